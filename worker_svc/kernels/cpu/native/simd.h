// Vectors of 16 numbers on any CPU, and the instructions that multiply and add them up.
//
// The compiler splits a vector into the registers that the CPU has. It must not contract or reorder
// floating-point operations (-ffp-contract=off), so that a row's result is the same in every loop.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nano {

constexpr int LANES = 16;

typedef float F32s __attribute__((vector_size(64)));
typedef int32_t I32s __attribute__((vector_size(64)));
typedef uint32_t U32s __attribute__((vector_size(64)));
typedef double F64s __attribute__((vector_size(128)));
typedef uint16_t U16s __attribute__((vector_size(32)));
typedef uint8_t U8s __attribute__((vector_size(16)));

template <class V>
inline V load(const void* address) {
    V v;
    std::memcpy(&v, address, sizeof v);
    return v;
}

template <class V>
inline void store(void* address, V v) {
    std::memcpy(address, &v, sizeof v);
}

// The first `count` numbers at an address, or as many as a vector holds; the other lanes are 0.
template <class V>
inline V load_first(const void* address, int64_t count) {
    if (count >= LANES) return load<V>(address);
    V v{};
    std::memcpy(&v, address, count * sizeof(v[0]));
    return v;
}

template <class V>
inline void store_first(void* address, V v, int64_t count) {
    if (count >= LANES) return store(address, v);
    std::memcpy(address, &v, count * sizeof(v[0]));
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline F32s splat(float x) { return F32s{} + x; }
inline I32s splat(int32_t x) { return I32s{} + x; }

// x · y + z, rounded once.
inline F32s fma(F32s x, F32s y, F32s z) {
#if defined(__AVX512F__)
    return (F32s)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    struct Halves {
        __m256 low, high;
    };
    auto a = bits<Halves>(x), b = bits<Halves>(y), c = bits<Halves>(z);
    return bits<F32s>(Halves{_mm256_fmadd_ps(a.low, b.low, c.low),
                             _mm256_fmadd_ps(a.high, b.high, c.high)});
#else
    for (int i = 0; i < LANES; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
#endif
}

inline F32s to_floats(I32s x) { return __builtin_convertvector(x, F32s); }

// The nearest integers, ties to even, of numbers within ±2²².
inline I32s nearest(F32s x) {
    const F32s shift = splat(12582912.0f);  // 1.5 · 2²³
    return bits<I32s>(x + shift) - bits<I32s>(shift);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// `f` of both halves. GCC makes scalar code of comparisons that are longer than a register.
template <class F>
inline F32s by_halves(F32s x, F32s y, const F& f) {
    struct Halves {
        __m256 low, high;
    };
    auto a = bits<Halves>(x), b = bits<Halves>(y);
    return bits<F32s>(Halves{f(a.low, b.low), f(a.high, b.high)});
}

// y where either is NaN
inline F32s larger(F32s x, F32s y) {
    return by_halves(x, y, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
inline F32s smaller(F32s x, F32s y) {
    return by_halves(x, y, [](__m256 a, __m256 b) { return _mm256_min_ps(a, b); });
}
#else
// y where either is NaN
inline F32s larger(F32s x, F32s y) { return x > y ? x : y; }
inline F32s smaller(F32s x, F32s y) { return x < y ? x : y; }
#endif

inline F32s magnitude(F32s x) { return bits<F32s>(bits<U32s>(x) & 0x7fffffff); }

// Joins lanes i and i + 8, and then those of the rest in this way, until 4 are left.
template <class Join>
inline auto join_to_4(F32s x, const Join& join) {
    typedef float F32s8 __attribute__((vector_size(32)));
    typedef float F32s4 __attribute__((vector_size(16)));
    struct Halves {
        F32s8 low, high;
    };
    struct Quarters {
        F32s4 low, high;
    };
    const auto halves = bits<Halves>(x);
    const auto quarters = bits<Quarters>(join(halves.low, halves.high));
    return join(quarters.low, quarters.high);
}

// The sum of all lanes, always in the same order.
inline float sum(F32s x) {
    const auto part = join_to_4(x, [](auto a, auto b) { return a + b; });
    return (part[0] + part[2]) + (part[1] + part[3]);
}

inline int32_t sum(I32s x) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

// The largest lane; lanes of NaN count as −∞.
inline float largest(F32s x) {
    x = x == x ? x : splat(-INFINITY);
    const auto part = join_to_4(x, [](auto a, auto b) { return a > b ? a : b; });
    float top = part[0];
    for (int i = 1; i < 4; i++) top = part[i] > top ? part[i] : top;
    return top;
}

// eˣ within 2 ulp, or 0 if it is below 2⁻¹²⁶, for x in [−88, 88].
//
// The integer part of x / ln 2 becomes the exponent. For the rest, in [−0.5, 0.5] · ln 2, the Taylor
// series to the seventh power is exact to float32 (as in Moshier's Cephes, expf).
inline F32s exp_in_range(F32s x) {
    I32s n = nearest(x * 1.4426950408889634f);
    F32s exponent = to_floats(n);
    F32s r = fma(exponent, splat(-0.693359375f), x);
    r = fma(exponent, splat(2.12194440e-4f), r);
    F32s series = splat(1.0f / 5040);
    for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        series = fma(series, r, splat(term));
    return series * bits<F32s>((n + 127) << 23);
}

// eˣ of x, or of the nearest number in [−88, 88].
inline F32s exp(F32s x) {
    return exp_in_range(smaller(splat(88.0f), larger(splat(-88.0f), x)));
}

// bfloat16 → float32
inline float widen(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
inline F32s widen(U16s x) { return bits<F32s>(__builtin_convertvector(x, U32s) << 16); }

// float32 → the nearest bfloat16, ties to even
inline uint16_t narrow(float x) {
    uint32_t b = bits<uint32_t>(x);
    return uint16_t((b + ((b >> 16) & 1) + 0x7fff) >> 16);
}
inline U16s narrow(F32s x) {
    U32s b = bits<U32s>(x);
    return __builtin_convertvector((b + ((b >> 16) & 1) + 0x7fff) >> 16, U16s);
}

// Adds to each lane of `total` the products of two pairs of bfloat16.
inline F32s add_pairs(F32s total, U32s x, U32s y) {
#if defined(__AVX512BF16__)
    return (F32s)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)y);
#else
    total = fma(bits<F32s>(x << 16), bits<F32s>(y << 16), total);
    return fma(bits<F32s>(x & 0xffff0000), bits<F32s>(y & 0xffff0000), total);
#endif
}

#if defined(__AVX2__)
inline __m256i add_codes(__m256i total, __m256i bytes, __m256i signed_bytes) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(total, bytes, signed_bytes);
#else
    // By words, because the sums of bytes' products in `pmaddubsw` saturate.
    auto even = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)),
                                  _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8));
    auto odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(signed_bytes, 8));
    return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
#endif
}
#endif

// Adds to each lane of `total` the products of four unsigned bytes and four signed bytes.
inline I32s add_codes(I32s total, U32s bytes, U32s signed_bytes) {
#if defined(__AVX512VNNI__)
    return (I32s)_mm512_dpbusd_epi32((__m512i)total, (__m512i)bytes, (__m512i)signed_bytes);
#elif defined(__AVX2__)
    struct Halves {
        __m256i low, high;
    };
    auto w = bits<Halves>(bytes), x = bits<Halves>(signed_bytes), t = bits<Halves>(total);
    t.low = add_codes(t.low, w.low, x.low);
    t.high = add_codes(t.high, w.high, x.high);
    return bits<I32s>(t);
#else
    for (int shift = 0; shift < 32; shift += 8) {
        I32s w = bits<I32s>((bytes >> shift) & 0xff);
        I32s x = bits<I32s>(signed_bytes << (24 - shift)) >> 24;
        total += w * x;
    }
    return total;
#endif
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

}  // namespace nano
