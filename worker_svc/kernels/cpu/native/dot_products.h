// Sums of products of short numbers in the lanes of vectors, by the CPU's best instructions.
#pragma once

#include "simd.h"

namespace nano {

// Adds to each lane of `total` the products of two pairs of bfloat16.
inline F32s add_pairs(F32s total, U32s x, U32s y) {
#if defined(__AVX512BF16__)
    return (F32s)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)y);
#else
    total = fma(bits<F32s>(x << 16), bits<F32s>(y << 16), total);
    return fma(bits<F32s>(x & 0xffff0000), bits<F32s>(y & 0xffff0000), total);
#endif
}

// The sums of neighbouring products, of words in each lane and of unsigned and signed bytes in each
// word, where the CPU cannot add all products of a lane.
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
#define NANO_MULTIPLIES_WORDS
inline Register<int32_t> multiply_words(Register<uint32_t> x, Register<uint32_t> y) {
    return (Register<int32_t>)_mm512_madd_epi16((__m512i)x, (__m512i)y);
}
inline Register<uint32_t> multiply_bytes(Register<uint32_t> x, Register<uint32_t> y) {
    return (Register<uint32_t>)_mm512_maddubs_epi16((__m512i)x, (__m512i)y);
}
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define NANO_MULTIPLIES_WORDS
inline Register<int32_t> multiply_words(Register<uint32_t> x, Register<uint32_t> y) {
    return (Register<int32_t>)_mm256_madd_epi16((__m256i)x, (__m256i)y);
}
inline Register<uint32_t> multiply_bytes(Register<uint32_t> x, Register<uint32_t> y) {
    return (Register<uint32_t>)_mm256_maddubs_epi16((__m256i)x, (__m256i)y);
}
#endif

// Adds to each lane of `total` the products of four unsigned bytes and four signed bytes.
inline I32s add_codes(I32s total, U32s bytes, U32s signed_bytes) {
    using Ints = Register<int32_t>;
    using Words = Register<uint32_t>;
    return each([](Ints total, Words bytes, Words signed_bytes) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)bytes, (__m512i)signed_bytes);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)bytes, (__m256i)signed_bytes);
#elif defined(NANO_MULTIPLIES_WORDS)
        // By words, because the sums of bytes' products in `pmaddubsw` may saturate.
        typedef int16_t Shorts __attribute__((vector_size(sizeof(Ints))));
        const auto w = (Shorts)bytes, x = (Shorts)signed_bytes;
        const auto even = multiply_words((Words)(w & 0xff), (Words)(x << 8 >> 8));
        return total + (even + multiply_words((Words)(w >> 8 & 0xff), (Words)(x >> 8)));
#else
        for (int shift = 0; shift < 32; shift += 8) {
            const auto w = (Ints)((bytes >> shift) & 0xff);
            const auto x = (Ints)(signed_bytes << (24 - shift)) >> 24;
            total += w * x;
        }
        return total;
#endif
    }, total, bytes, signed_bytes);
}

// The same for unsigned bytes below 128, where `pmaddubsw` does not saturate.
inline I32s add_small_codes(I32s total, U32s bytes, U32s signed_bytes) {
#if defined(NANO_MULTIPLIES_WORDS)
    using Words = Register<uint32_t>;
    const auto ones = Words{} + 0x00010001;
    return each([=](Register<int32_t> total, Words bytes, Words signed_bytes) {
        return total + multiply_words(multiply_bytes(bytes, signed_bytes), ones);
    }, total, bytes, signed_bytes);
#else
    return add_codes(total, bytes, signed_bytes);
#endif
}

// Sums of products in words, which take an instruction less where a CPU cannot add all products of a
// lane. `add_to_words` adds the products of two unsigned bytes below 128 and two signed bytes to each
// word, and `add_words` adds the two words of each lane.
#if defined(NANO_MULTIPLIES_WORDS)
constexpr bool ADDS_TO_WORDS = true;
inline I32s add_to_words(I32s total, U32s bytes, U32s signed_bytes) {
    using Ints = Register<int32_t>;
    using Words = Register<uint32_t>;
    typedef uint16_t Shorts __attribute__((vector_size(sizeof(Ints))));
    return each([](Ints total, Words bytes, Words signed_bytes) {
        return settled((Ints)((Shorts)total + (Shorts)multiply_bytes(bytes, signed_bytes)));
    }, total, bytes, signed_bytes);
}
inline I32s add_words(I32s words) {
    return each([](Register<int32_t> words) {
        return multiply_words((Register<uint32_t>)words, Register<uint32_t>{} + 0x00010001);
    }, words);
}
#else
constexpr bool ADDS_TO_WORDS = false;
inline I32s add_to_words(I32s total, U32s, U32s) { return total; }
inline I32s add_words(I32s words) { return words; }
#endif

}  // namespace nano
