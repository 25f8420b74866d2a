// How attention multiplies the words of a cache.
//
// A word of 32 bits holds dimensions of one key, or one dimension of several values. The numbers of
// a query or of weights that multiply a word are its *factor*.
//
//     cache     numbers in a word  factor
//     float32   1                  a float32
//     bfloat16  2                  two bfloat16, or two float32 if the CPU cannot multiply bfloat16
//     int8      4                  four codes of 16 bits, their upper and then their lower bytes
//
// Codes of 16 bits are precise enough for a cache of 8 bits, and their sums are exact.
#pragma once

#include "kv_store.h"

namespace nano {

// The first `count` lanes of x, and `other` in the rest.
inline F32s first_lanes(F32s x, int64_t count, float other) {
    return select(lane_numbers() < splat(int32_t(count)), x, splat(other));
}

// Kinds without scales. Factors are numbers, and sums are in float32.
template <class Self>
struct Unscaled {
    typedef F32s Sums;
    static constexpr int SUMS = 1;
    static constexpr bool SCALED = false;
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
    static void put_weights(uint8_t* factors, F32s weights, F32s, float) {
        Self::put(factors, weights);
    }
};

struct Floats : Unscaled<Floats> {
    static constexpr int DEPTH = 1;
    typedef float Factor;

    static void put(uint8_t* factors, F32s numbers) { store(factors, numbers); }
    static void add_key(F32s& sums, U32s words, Factor factor) {
        sums = fma(bits<F32s>(words), splat(factor), sums);
    }
    static void add_value(F32s& sums, U32s words, Factor factor) { add_key(sums, words, factor); }
};

#if defined(__AVX512BF16__)
struct Pairs : Unscaled<Pairs> {
    static constexpr int DEPTH = 2;
    typedef uint32_t Factor;

    static void put(uint8_t* factors, F32s numbers) {
        store(factors, _mm512_cvtneps_pbh((__m512)numbers));
    }
    static void add_key(F32s& sums, U32s words, Factor factor) {
        sums = add_pairs(sums, words, splat(factor));
    }
    static void add_value(F32s& sums, U32s words, Factor factor) { add_key(sums, words, factor); }
};
#else
struct Pairs : Unscaled<Pairs> {
    static constexpr int DEPTH = 2;
    struct Factor {
        float first, second;
    };

    static void put(uint8_t* factors, F32s numbers) { store(factors, numbers); }
    static void add_key(F32s& sums, U32s words, Factor factor) {
        sums = fma(bits<F32s>(words << 16), splat(factor.first), sums);
        sums = fma(bits<F32s>(words & 0xffff0000), splat(factor.second), sums);
    }
    static void add_value(F32s& sums, U32s words, Factor factor) { add_key(sums, words, factor); }
};
#endif

struct Codes {
    static constexpr int DEPTH = 4, SUMS = 2;
    static constexpr bool SCALED = true;
    // The largest codes of 16 bits. The upper bytes of a query's codes stay within ±127.
    static constexpr int QUERY_CODE = 127 * 256 + 127, WEIGHT_CODE = 65535;
    struct Factor {
        uint32_t upper, lower;
    };
    struct Sums {
        I32s upper, lower;
    };
    struct Query {
        Sums start;  // takes away what KEY_ZERO adds
        float scale;
    };

    static Sums keys_start(const Query& query) { return query.start; }
    static F32s score(Sums sums, const Query& query, F32s key_scales) {
        return floats(sums) * query.scale * key_scales;
    }
    static Sums values_start(F32s) { return {I32s{}, I32s{}}; }
    static F32s total(Sums sums, float scale, F32s before) {
        return fma(floats(sums), splat(scale), before);
    }
    static F32s floats(Sums sums) {
        return fma(to_floats(sums.upper), splat(256.0f), to_floats(sums.lower));
    }

    static void add_key(Sums& sums, U32s words, Factor factor) {
        sums.upper = add_codes(sums.upper, words, splat(factor.upper));
        sums.lower = add_codes(sums.lower, words, splat(factor.lower));
    }
    static void add_value(Sums& sums, U32s words, Factor factor) {
        sums.upper = add_codes(sums.upper, splat(factor.upper), words);
        sums.lower = add_codes(sums.lower, splat(factor.lower), words);
    }

    static Query pack(const float* query, int64_t head_dim, float scale, uint8_t* factors) {
        F32s tops{};
        for (int64_t i = 0; i < head_dim; i += LANES)
            tops = larger(magnitude(load_first<F32s>(query + i, head_dim - i)), tops);
        const float top = largest(tops), factor = top > 0 ? QUERY_CODE / top : 0;
        I32s uppers{}, lowers{};
        for (int64_t i = 0; i < head_dim; i += LANES) {
            // nearest() is exact only within ±2²², as these are.
            I32s codes = nearest(load_first<F32s>(query + i, head_dim - i) * factor);
            I32s upper = (codes + 128) >> 8, lower = codes - (upper << 8);
            uppers += upper;
            lowers += lower;
            put(factors + 2 * i, (upper << 8) + (lower & 255));
        }
        Sums start = {splat(-KEY_ZERO * sum(uppers)), splat(-KEY_ZERO * sum(lowers))};
        return {start, top / QUERY_CODE * scale};
    }
    static void put_weights(uint8_t* factors, F32s weights, F32s value_scales, float code_factor) {
        F32s codes = weights * value_scales * code_factor + 0.5f;
        put(factors, convert<int32_t>(codes));
    }
    // Writes the factors of 16 codes.
    static void put(uint8_t* factors, I32s codes) {
        typedef uint8_t Bytes __attribute__((vector_size(32)));
        const Bytes order = {1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14, 17, 19, 21, 23,
                             16, 18, 20, 22, 25, 27, 29, 31, 24, 26, 28, 30};
        store(factors, __builtin_shuffle(bits<Bytes>(low_words(codes)), order));
    }
};

}  // namespace nano
