// How attention multiplies the words of a cache.
//
// A word of 32 bits holds dimensions of one key, or one dimension of several values. The numbers of
// a query or of weights that multiply a word are its *factor*.
//
//     cache     numbers in a word  factor
//     float32   1                  a float32
//     bfloat16  2                  two bfloat16, or two float32 if the CPU cannot multiply bfloat16
//     int8      4                  four codes of 8 bits
//
// Queries and weights are as precise as keys and values then. Sums of codes are exact.
#pragma once

#include "dot_products.h"
#include "kv_store.h"

namespace nano {

// The first `count` lanes of x, and those of `other` in the rest.
inline F32s first_lanes(F32s x, int64_t count, F32s other) {
    return select(lane_numbers() < splat(int32_t(count)), x, other);
}
inline F32s first_lanes(F32s x, int64_t count, float other) {
    return first_lanes(x, count, splat(other));
}

// Kinds without scales. Factors are numbers, and sums are in float32.
template <class Self>
struct Unscaled {
    typedef F32s Sums;
    static constexpr bool SCALED = false;
    static constexpr int MAX_ROWS = 6;
    struct Query {};  // what the sums of a query need besides its factors

    static F32s keys_start(Query) { return F32s{}; }
    static F32s score(F32s sums, Query, F32s) { return sums; }
    static F32s values_start(F32s total) { return total; }
    static F32s total(F32s sums, float, F32s) { return sums; }

    static Query pack(const float* query, int64_t head_dim, float scale, uint8_t* factors) {
        for (int64_t i = 0; i < head_dim; i += LANES)
            Self::put(factors + i * sizeof(typename Self::Factor) / Self::DEPTH,
                      load_first<F32s>(query + i, head_dim - i) * scale);
        return {};
    }
    template <int COUNT>
    static float put_weights(uint8_t* factors, const F32s (&weights)[COUNT], const float*, int64_t) {
        for (int i = 0; i < COUNT; i++)
            Self::put(factors + i * LANES * sizeof(typename Self::Factor) / Self::DEPTH, weights[i]);
        return 1;
    }
};

struct Floats : Unscaled<Floats> {
    static constexpr int DEPTH = 1;
    typedef float Factor;

    static void put(uint8_t* factors, F32s numbers) { store(factors, numbers); }
    static void add_key(F32s& sums, U32s words, const Factor* factor) {
        sums = settled(fma(bits<F32s>(words), splat(load<Factor>(factor)), sums));
    }
    static void add_value(F32s& sums, U32s words, const Factor* factor) {
        add_key(sums, words, factor);
    }
};

#if defined(__AVX512BF16__)
struct Pairs : Unscaled<Pairs> {
    static constexpr int DEPTH = 2;
    typedef uint32_t Factor;

    static void put(uint8_t* factors, F32s numbers) {
        store(factors, _mm512_cvtneps_pbh((__m512)numbers));
    }
    static void add_key(F32s& sums, U32s words, const Factor* factor) {
        sums = add_pairs(sums, words, splat(load<Factor>(factor)));
    }
    static void add_value(F32s& sums, U32s words, const Factor* factor) {
        add_key(sums, words, factor);
    }
};
#else
struct Pairs : Unscaled<Pairs> {
    static constexpr int DEPTH = 2;
    // Without AVX-512, GCC spills the sums of a sixth row.
    static constexpr int MAX_ROWS = REGISTER_LANES == LANES ? 6 : 5;
    typedef uint64_t Factor;

    static void put(uint8_t* factors, F32s numbers) { store(factors, numbers); }
    static void add_key(F32s& sums, U32s words, const Factor* factor) {
        // Loads one number at a time: GCC would send a pair through memory.
        const auto* numbers = (const char*)factor;
        sums = settled(fma(bits<F32s>(words << 16), splat(load<float>(numbers)), sums));
        sums = settled(fma(bits<F32s>(words & 0xffff0000), splat(load<float>(numbers + 4)), sums));
    }
    static void add_value(F32s& sums, U32s words, const Factor* factor) {
        add_key(sums, words, factor);
    }
};
#endif

struct Codes {
    static constexpr int DEPTH = 4;
    static constexpr bool SCALED = true;
    static constexpr int MAX_ROWS = 6;
    static constexpr int QUERY_CODE = 127, WEIGHT_CODE = 255;  // the largest codes
    static constexpr float SMALLEST = 1e-30f;  // smaller weights are rounded to 0
    typedef uint32_t Factor;
    typedef I32s Sums;
    struct Query {
        I32s start;  // takes away what KEY_ZERO adds
        float scale;
    };

    static I32s keys_start(const Query& query) { return query.start; }
    static F32s score(I32s sums, const Query& query, F32s key_scales) {
        return to_floats(sums) * query.scale * key_scales;
    }
    static I32s values_start(F32s) { return I32s{}; }
    static F32s total(I32s sums, float scale, F32s before) {
        return fma(to_floats(sums), splat(scale), before);
    }

    static void add_key(I32s& sums, U32s words, const Factor* factor) {
        sums = add_codes(sums, words, splat(load<Factor>(factor)));
    }
    static void add_value(I32s& sums, U32s words, const Factor* factor) {
        sums = add_codes(sums, splat(load<Factor>(factor)), words);
    }

    static Query pack(const float* query, int64_t head_dim, float scale, uint8_t* factors) {
        F32s tops{};
        for (int64_t i = 0; i < head_dim; i += LANES)
            tops = larger(magnitude(load_first<F32s>(query + i, head_dim - i)), tops);
        const float top = largest(tops), factor = top > 0 ? QUERY_CODE / top : 0;
        I32s codes{};
        for (int64_t i = 0; i < head_dim; i += LANES) {
            I32s some = nearest(load_first<F32s>(query + i, head_dim - i) * factor);
            codes += some;
            store(factors + i, low_bytes(some));
        }
        return {splat(-KEY_ZERO * sum(codes)), top / QUERY_CODE * scale};
    }

    // Rounds weights, times their values' scales, to codes -> the scale of the codes.
    template <int COUNT>
    static float put_weights(uint8_t* factors, const F32s (&weights)[COUNT],
                             const float* value_scales, int64_t visible) {
        F32s scaled[COUNT], tops{};
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) {
            scaled[i] = weights[i] * load<F32s>(value_scales + i * LANES);
            if (visible < (i + 1) * LANES)
                scaled[i] = first_lanes(scaled[i], visible - i * LANES, 0);
            tops = larger(scaled[i], tops);
        }
        const float top = largest(tops), factor = top > SMALLEST ? WEIGHT_CODE / top : 0;
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++)
            store(factors + i * LANES, low_bytes(nearest(scaled[i] * factor)));
        return top / WEIGHT_CODE;
    }
};

}  // namespace nano
