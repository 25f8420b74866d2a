// What the kernels that sample tokens share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "step.h"
#include "team.h"

namespace nano {

// With fewer logits than this, one thread is done before a second thread wakes.
constexpr int64_t PARALLEL_LOGITS = 1 << 15;

// The first `count` of 16 logits. The other lanes are −∞.
inline F32s load_logits(const float* numbers, int64_t count) {
    if (count >= LANES) return load<F32s>(numbers);
    F32s some = splat(-INFINITY);
    std::memcpy(&some, numbers, count * sizeof(float));
    return some;
}

// eˣ for x up to 88, or 0 if x is NaN.
inline F32s exp_or_zero(F32s x) { return exp_in_range(larger(x, splat(-88.0f))); }

}  // namespace nano
