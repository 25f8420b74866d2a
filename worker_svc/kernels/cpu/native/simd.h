// Vectors of 16 numbers on any CPU.
//
// The compiler must not contract or reorder floating-point operations (-ffp-contract=off), so that
// a row's result is the same in every loop.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nano {

constexpr int LANES = 16;
// The 32-bit lanes of a register.
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif

// A vector in two parts. The compiler could split it itself, but GCC 12 keeps vectors in memory
// that are longer than a register, and compares their lanes one by one.
template <class Part>
struct Halves {
    using Half = Part;
    using Number = std::remove_cvref_t<decltype(Part{}[0])>;
    Part low, high;

    Halves() = default;
    Halves(Part low, Part high) : low(low), high(high) {}
    Halves(Number x) : low(x - Part{}), high(low) {}

    Number operator[](int lane) const {
        constexpr int COUNT = sizeof(Part) / sizeof(Number);
        return lane < COUNT ? low[lane] : high[lane - COUNT];
    }

    friend Halves operator-(Halves x) { return {-x.low, -x.high}; }
    friend Halves operator~(Halves x) { return {~x.low, ~x.high}; }
    friend Halves operator+(Halves x, Halves y) { return {x.low + y.low, x.high + y.high}; }
    friend Halves operator-(Halves x, Halves y) { return {x.low - y.low, x.high - y.high}; }
    friend Halves operator*(Halves x, Halves y) { return {x.low * y.low, x.high * y.high}; }
    friend Halves operator/(Halves x, Halves y) { return {x.low / y.low, x.high / y.high}; }
    friend Halves operator&(Halves x, Halves y) { return {x.low & y.low, x.high & y.high}; }
    friend Halves operator|(Halves x, Halves y) { return {x.low | y.low, x.high | y.high}; }
    friend Halves operator^(Halves x, Halves y) { return {x.low ^ y.low, x.high ^ y.high}; }
    friend Halves operator<<(Halves x, Halves y) { return {x.low << y.low, x.high << y.high}; }
    friend Halves operator>>(Halves x, Halves y) { return {x.low >> y.low, x.high >> y.high}; }
    friend auto operator==(Halves x, Halves y) { return nano::Halves(x.low == y.low, x.high == y.high); }
    friend auto operator<(Halves x, Halves y) { return nano::Halves(x.low < y.low, x.high < y.high); }
    friend auto operator>(Halves x, Halves y) { return y < x; }
    Halves& operator+=(Halves y) { return *this = *this + y; }
    Halves& operator*=(Halves y) { return *this = *this * y; }
};

template <class V>
constexpr bool IS_HALVES = false;
template <class Part>
constexpr bool IS_HALVES<Halves<Part>> = true;

// COUNT numbers, at most as many as a register holds 32-bit lanes.
template <class Number, int COUNT = LANES>
struct VectorOf {
    using Half = typename VectorOf<Number, COUNT / 2>::Type;
    using Type = Halves<Half>;
};
template <class Number>
struct VectorOf<Number, REGISTER_LANES> {
    typedef Number Type __attribute__((vector_size(REGISTER_LANES * sizeof(Number))));
};
template <class Number>
using Lanes = typename VectorOf<Number>::Type;
template <class Number>
using Register = typename VectorOf<Number, REGISTER_LANES>::Type;

using F32s = Lanes<float>;
using I32s = Lanes<int32_t>;
using U32s = Lanes<uint32_t>;
using U16s = Lanes<uint16_t>;
using U8s = Lanes<uint8_t>;

// The results of f for all registers of vectors.
template <class F, class V, class... More>
inline auto each(const F& f, V x, More... more) {
    if constexpr (IS_HALVES<V>)
        return Halves(each(f, x.low, more.low...), each(f, x.high, more.high...));
    else
        return f(x, more...);
}

template <class V>
inline V load(const void* address) {
    if constexpr (IS_HALVES<V>) {
        using Half = typename V::Half;
        return {load<Half>(address), load<Half>((const char*)address + sizeof(Half))};
    } else {
        V v;
        std::memcpy(&v, address, sizeof v);
        return v;
    }
}

template <class V>
inline void store(void* address, V v) {
    if constexpr (IS_HALVES<V>) {
        store(address, v.low);
        store((char*)address + sizeof v.low, v.high);
    } else {
        std::memcpy(address, &v, sizeof v);
    }
}

// The first `count` numbers at an address, or as many as a vector holds; the other lanes are 0.
template <class V>
inline V load_first(const void* address, int64_t count) {
    if (count >= LANES) return load<V>(address);
    V v{};
    std::memcpy(&v, address, count * (sizeof v / LANES));
    return v;
}

template <class V>
inline void store_first(void* address, V v, int64_t count) {
    if (count >= LANES) return store(address, v);
    std::memcpy(address, &v, count * (sizeof v / LANES));
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    if constexpr (IS_HALVES<To> && IS_HALVES<From>) {
        using Half = typename To::Half;
        return {bits<Half>(from.low), bits<Half>(from.high)};
    } else {
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
}

// Subtracting 0 changes no number, not even −0. So the compiler leaves it out.
inline F32s splat(float x) { return x - F32s{}; }
inline I32s splat(int32_t x) { return x - I32s{}; }
inline U32s splat(uint32_t x) { return x - U32s{}; }

// 0, 1, ..., 15
inline I32s lane_numbers() {
    constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<I32s>(NUMBERS);
}

// Lanes of x where a comparison holds, and of y elsewhere.
template <class Mask, class V>
inline V select(Mask mask, V x, V y) {
    return each([](auto mask, auto x, auto y) { return mask ? x : y; }, mask, x, y);
}

// Each lane as a number of another type.
template <class Number, class V>
inline Lanes<Number> convert(V x) {
    return each([](auto x) { return __builtin_convertvector(x, Register<Number>); }, x);
}

inline F32s to_floats(I32s x) { return convert<float>(x); }

// The lower 16 or 8 bits of each lane.
#if defined(__AVX2__) && !defined(__AVX512F__)
// GCC 12 would take the lanes one by one.
inline U16s low_words(I32s x) {
    x = x & 0xffff;
    const auto words = _mm256_packus_epi32((__m256i)x.low, (__m256i)x.high);  // quarters 0 2 1 3
    return bits<U16s>(_mm256_permute4x64_epi64(words, 0b11'01'10'00));
}
inline U8s low_bytes(I32s x) {
    const U16s words = low_words(x & 0xff);
    return bits<U8s>(_mm_packus_epi16((__m128i)words.low, (__m128i)words.high));
}
#else
inline U16s low_words(I32s x) { return convert<uint16_t>(x); }
inline U8s low_bytes(I32s x) { return convert<uint8_t>(x); }
#endif

// Has the compiler compute v before it computes what follows. Without this, it keeps more vectors at
// a time than 16 registers hold.
template <class V>
inline V settled(V v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return each([](auto x) {
        asm volatile("" : "+x"(x));
        return x;
    }, v);
#else
    return v;
#endif
}

// x · y + z, rounded once.
inline F32s fma(F32s x, F32s y, F32s z) {
    using Part = Register<float>;
    return each([](Part x, Part y, Part z) {
#if defined(__AVX512F__)
        return (Part)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__) && defined(__FMA__)
        return (Part)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
        for (int i = 0; i < REGISTER_LANES; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
        return z;
#endif
    }, x, y, z);
}

// The nearest integers, ties to even, of numbers within ±2²².
inline I32s nearest(F32s x) {
    const F32s shift = splat(12582912.0f);  // 1.5 · 2²³
    return bits<I32s>(x + shift) - bits<I32s>(shift);
}

// y where either is NaN
#if defined(__AVX512F__)
inline F32s larger(F32s x, F32s y) { return _mm512_max_ps(x, y); }
inline F32s smaller(F32s x, F32s y) { return _mm512_min_ps(x, y); }
#elif defined(__AVX2__)
inline F32s larger(F32s x, F32s y) {
    return {_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)};
}
inline F32s smaller(F32s x, F32s y) {
    return {_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)};
}
#else
inline F32s larger(F32s x, F32s y) { return select(x > y, x, y); }
inline F32s smaller(F32s x, F32s y) { return select(x < y, x, y); }
#endif

inline F32s magnitude(F32s x) { return bits<F32s>(bits<U32s>(x) & 0x7fffffff); }

template <class Number, int COUNT>
struct ShortVector {
    typedef Number Type __attribute__((vector_size(COUNT * sizeof(Number))));
};

// Joins lanes i and i + 8, and then those of the rest in this way, until 4 are left.
template <class V, class Join>
inline auto join_to_4(V x, const Join& join) {
    typedef std::remove_cvref_t<decltype(x[0])> Number;
    const auto halves = bits<Halves<typename ShortVector<Number, 8>::Type>>(x);
    const auto quarters =
        bits<Halves<typename ShortVector<Number, 4>::Type>>(join(halves.low, halves.high));
    return join(quarters.low, quarters.high);
}

// The sum of all lanes, always in the same order.
template <class V>
inline auto sum(V x) {
    const auto part = join_to_4(x, [](auto a, auto b) { return a + b; });
    return (part[0] + part[2]) + (part[1] + part[3]);
}

inline int32_t largest(I32s x) {
    const auto part = join_to_4(x, [](auto a, auto b) { return a > b ? a : b; });
    return std::max(std::max(part[0], part[1]), std::max(part[2], part[3]));
}

// The largest lane; lanes of NaN count as −∞.
inline float largest(F32s x) {
    x = select(x == x, x, splat(-INFINITY));
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
inline F32s widen(U16s x) { return bits<F32s>(convert<uint32_t>(x) << 16); }

// float32 → the nearest bfloat16, ties to even
inline U16s narrow(F32s x) {
    U32s b = bits<U32s>(x);
    return low_words(bits<I32s>((b + ((b >> 16) & 1) + 0x7fff) >> 16));
}

struct Vector {
    const void* data;
    int64_t is_bfloat16;  // else float32
};

// The first `count` numbers from number i on, or as many as 16; the other lanes are 0.
inline F32s load_first(const Vector& vector, int64_t i, int64_t count) {
    if (vector.is_bfloat16) return widen(load_first<U16s>((const uint16_t*)vector.data + i, count));
    return load_first<F32s>((const float*)vector.data + i, count);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t size, int64_t multiple) { return ceil_div(size, multiple) * multiple; }

}  // namespace nano
