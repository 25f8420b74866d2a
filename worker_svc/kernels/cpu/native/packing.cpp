// Packs the rows of a product for each kind of weight, and unpacks the rows of tables.
#include <algorithm>

#include "product_kinds.h"

namespace nano {
namespace {

void pack_floats(const float* x, int64_t in, uint32_t* words) {
    std::memcpy(words, x, in * sizeof(float));
}

void pack_pairs(const float* x, int64_t in, uint32_t* words) {
    auto* numbers = reinterpret_cast<uint16_t*>(words);
    for (int64_t k = 0; k < in; k += LANES)
        store_first(numbers + k, narrow(load_first<F32s>(x + k, in - k)), in - k);
    if (in % 2) numbers[in] = 0;
}

// Rounds x to codes -> lane i has the sum of the codes i, i + LANES, ...
inline I32s pack_codes(const float* x, int64_t count, float factor, int8_t* codes) {
    I32s sums = {};
    for (int64_t k = 0; k < count; k += LANES) {
        const I32s some = nearest(load_first<F32s>(x + k, count - k) * factor);
        sums += some;
        store_first(codes + k, low_bytes(some), count - k);
    }
    return sums;
}

// What the sums of a segment begin with, from the sums of its codes.
template <class K>
int32_t start_of(const Weight& weight, I32s sums) {
    if (weight.zeros) return sum(sums);
    if constexpr (!std::is_same_v<K, Int4InWords>) return -K::ZERO * sum(sums);
    const I32s of_high_words = select((lane_numbers() & 2) == splat(2), sums, I32s{});
    const int32_t high = sum(of_high_words), low = sum(sums) - high;
    return (-K::ZERO * low & 0xffff) | -K::ZERO * high << 16;
}

}  // namespace

float largest_magnitude(const float* x, int64_t in) {
    I32s tops = {};
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES) {
        I32s b = load<I32s>(x + k) & 0x7fffffff;
        tops = select(b > tops, b, tops);
    }
    int32_t top = largest(tops);
    for (; k < in; k++) top = std::max(top, bits<int32_t>(x[k]) & 0x7fffffff);
    return bits<float>(top);
}

int64_t words_of(const Weight& weight) {
    return with_kind(weight, [&](auto kind) {
        using K = decltype(kind);
        return ceil_div(weight.in / weight.groups, K::INPUTS) * weight.groups * K::WORDS;
    });
}

int64_t bytes_of_panel(const Weight& weight) {
    return with_kind(weight, [&](auto kind) {
        using K = decltype(kind);
        return ceil_div(weight.in / weight.groups, K::INPUTS) * weight.groups * K::BYTES;
    });
}

int64_t stride_of(int64_t words) { return (ceil_div(words, LANES) | 1) * LANES; }

int64_t segments_of(const Weight& weight) { return ceil_div(weight.in, weight.segment); }

template <class K>
static void pack_integers(const Weight& weight, const float* x, const Tops* tops, int64_t row,
                          const Packed& out) {
    const int64_t segments = segments_of(weight), words = words_of(weight);
    uint32_t* packed = out.words + row * out.stride;
    packed[words - 1] = 0;  // the last inputs of a step may be missing
    if (K::WORDS > 1) packed[words - 2] = 0;
    for (int64_t segment = 0; segment < segments; segment++) {
        const int64_t first = segment * weight.segment;
        const int64_t size = std::min(weight.segment, weight.in - first);
        float top;
        if (tops)
            top = tops->data[row * tops->stride + (tops->first_input + first) / tops->segment];
        else
            top = largest_magnitude(x + first, size);
        const float factor = top > 0 ? 127.0f / top : 0.0f;
        auto* codes = reinterpret_cast<int8_t*>(packed) + first;
        const int64_t place = row * segments + segment;
        out.scales[place] = top / 127.0f;
        out.sums[place] = start_of<K>(weight, pack_codes(x + first, size, factor, codes));
    }
}

void pack_row(const Weight& weight, const float* x, const Tops* tops, int64_t row,
              const Packed& out) {
    uint32_t* words = out.words + row * out.stride;
    with_kind(weight, [&](auto kind) {
        using K = decltype(kind);
        if constexpr (IS_INTEGER<K>)
            pack_integers<K>(weight, x, tops, row, out);
        else if constexpr (std::is_same_v<K, Bf16Pairs>)
            pack_pairs(x, weight.in, words);
        else
            pack_floats(x, weight.in, words);
    });
}

void pack(const PackArgs& args, Member& member) {
    const int64_t rows = *args.rows;
    member.each(rows, [&](int64_t row) {
        pack_row(*args.weight, args.x + row * args.weight->in, args.tops, row, args.out);
    });
}

void row_of(const Weight& weight, int64_t row, float* out) {
    const int64_t panel = row / PANEL, column = row % PANEL, size = weight.in / weight.groups;
    const char* codes = weight.codes + panel * bytes_of_panel(weight);
    with_kind(weight, [&](auto kind) {
        using K = decltype(kind);
        if constexpr (IS_INTEGER<K>)
            for (int64_t group = 0; group < weight.groups; group++) {
                const int64_t place = (panel * weight.groups + group) * PANEL + column;
                const int32_t zero = weight.zeros ? weight.zeros[place] : K::ZERO;
                const char* first = codes + group * ceil_div(size, K::INPUTS) * K::BYTES;
                for (int64_t i = 0; i < size; i += 4) {
                    const U32s w = K::load(first + i / K::INPUTS * K::BYTES, i % K::INPUTS / 4,
                                           column / LANES);
                    uint32_t word = w[column % LANES];
                    for (int64_t left = std::min<int64_t>(size - i, 4); left > 0; left--, word >>= 8)
                        *out++ = (int32_t(word & 0xff) - zero) * weight.scales[place];
                }
            }
    });
}

}  // namespace nano
