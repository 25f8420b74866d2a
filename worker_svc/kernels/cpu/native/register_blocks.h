// Loops over blocks of rows and vectors whose sums fit into the registers.
#pragma once

#include <type_traits>

#include "simd.h"

namespace nano {

constexpr int REGISTERS = REGISTER_LANES == LANES ? 24 : 6;  // of 16 numbers, for sums

// The vectors that a loop multiplies at once.
constexpr int width(int rows, int limit) {
    int width = 1;
    while (2 * width * rows <= REGISTERS && 2 * width <= limit) width *= 2;
    return width;
}

// Calls work(n) with n ≤ MAX as a constant.
template <int MAX, class Work>
inline void with_constant(int64_t n, const Work& work) {
    if constexpr (MAX > 1)
        if (n < MAX) return with_constant<MAX - 1>(n, work);
    work(std::integral_constant<int, MAX>{});
}

// Calls work(width, i) with constant widths, at most WIDTH, for all items i, ..., i + width − 1.
template <int WIDTH, class Work>
inline void in_blocks(int64_t items, const Work& work, int64_t i = 0) {
    for (; i + WIDTH <= items; i += WIDTH) work(std::integral_constant<int, WIDTH>{}, i);
    if constexpr (WIDTH > 1) in_blocks<WIDTH / 2>(items, work, i);
}

}  // namespace nano
