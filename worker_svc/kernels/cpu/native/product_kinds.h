// How products read each kind of weight.
#pragma once

#include <type_traits>

#include "dot_products.h"
#include "products.h"

namespace nano {

// The maximum number of rows of a tile, and of a tile that multiplies both halves of a panel at once.
// A larger one multiplies them one after the other.
//
// Of 32 registers, 24 hold the sums of floats, or 12 those of integers, beside which 12 hold the sums
// of segments in float32. Of 16 shorter registers, 12 hold sums, or 8 those of both halves. More rows of
// bytes are faster, although registers must be spilled (measured on Zen 3 and 4).
#if defined(__AVX512F__)
constexpr int FLOAT_ROWS = 12, WIDE_ROWS = 12, BYTE_ROWS = 6;
#elif defined(__AVX2__)
constexpr int FLOAT_ROWS = 6, WIDE_ROWS = 2, BYTE_ROWS = 4;
#else
constexpr int FLOAT_ROWS = 2, WIDE_ROWS = 2, BYTE_ROWS = 4;
#endif
constexpr int WORD_ROWS = 6;
constexpr int SEGMENT = 64;  // as in weights.py; other segments take a more general loop

// The kinds of weights: the bytes of a step, the words of x that it takes, and how it multiplies.

struct Float32 {
    using Sum = F32s;
    static constexpr int BYTES = 128, WORDS = 1, INPUTS = 1;
    static constexpr int MAX_ROWS = FLOAT_ROWS, MAX_WIDE_ROWS = WIDE_ROWS;
    // Half of the columns of a step, for one word of x.
    static U32s load(const char* step, int, int half) { return nano::load<U32s>(step + 64 * half); }
    static F32s add(F32s total, U32s w, U32s x) {
        return fma(bits<F32s>(x), bits<F32s>(w), total);
    }
};

struct Bfloat16 : Float32 {
    static constexpr int BYTES = 64;
    static U32s load(const char* step, int, int half) {
        const U32s both = nano::load<U32s>(step);
        return half ? both & 0xffff0000 : both << 16;
    }
};

struct Bf16Pairs : Float32 {
    static constexpr int INPUTS = 2;
    static F32s add(F32s total, U32s w, U32s x) { return add_pairs(total, w, x); }
};

struct Int8 : Float32 {
    using Sum = I32s;
    static constexpr int INPUTS = 4, ZERO = 128;
    static constexpr int MAX_ROWS = BYTE_ROWS, MAX_WIDE_ROWS = BYTE_ROWS;
    static I32s add(I32s total, U32s w, U32s x) { return add_codes(total, w, x); }
    static I32s finish(I32s total) { return total; }
};

struct Int4 : Int8 {
    static constexpr int WORDS = 2, INPUTS = 8, ZERO = 8;
    static U32s load(const char* step, int word, int half) {
        return (nano::load<U32s>(step + 64 * half) >> 4 * word) & 0x0f0f0f0f;
    }
    static I32s add(I32s total, U32s w, U32s x) { return add_small_codes(total, w, x); }
};

struct Int6 : Int8 {
    static constexpr int BYTES = 384, WORDS = 4, INPUTS = 16, ZERO = 32;
    static U32s load(const char* step, int word, int half) {
        const U32s low = Int4::load(step + word / 2 * Int4::BYTES, word % 2, half);
        const U32s high = nano::load<U32s>(step + 2 * Int4::BYTES + 64 * half);
        return low | ((word < 2 ? high << (4 - 2 * word) : high >> (2 * word - 4)) & 0x30303030);
    }
    static I32s add(I32s total, U32s w, U32s x) { return add_small_codes(total, w, x); }
};

// Adds up the products of a segment in words. None overflows: with the sum that a segment begins with,
// it is a sum of 32 products of a code − 8 and a code of x.
struct Int4InWords : Int4 {
    static constexpr int MAX_ROWS = WORD_ROWS, MAX_WIDE_ROWS = WIDE_ROWS;
    static I32s add(I32s total, U32s w, U32s x) { return add_to_words(total, w, x); }
    static I32s finish(I32s total) { return add_words(total); }
};

inline bool adds_in_words(const Weight& weight) {
    return ADDS_TO_WORDS && weight.kind == Kind::INT4 && !weight.zeros && weight.segment <= SEGMENT;
}

// Calls `call` with the type of a weight's kind.
template <class Call>
auto with_kind(const Weight& weight, const Call& call) {
    if (adds_in_words(weight)) return call(Int4InWords{});
    switch (weight.kind) {
        case Kind::FLOAT32: return call(Float32{});
        case Kind::BFLOAT16: return call(Bfloat16{});
        case Kind::BF16_PAIRS: return call(Bf16Pairs{});
        case Kind::INT8: return call(Int8{});
        case Kind::INT6: return call(Int6{});
        default: return call(Int4{});
    }
}

template <class K>
constexpr bool IS_INTEGER = std::is_same_v<typename K::Sum, I32s>;

}  // namespace nano
