#include "products.h"

#include <algorithm>

namespace nano {
namespace {

// The maximum number of rows of a tile, and of a tile that multiplies both halves of a panel at once.
// A larger one multiplies them one after the other.
//
// Of 32 registers, 24 hold the sums of floats, or 12 those of integers, beside which 12 hold the sums
// of pieces in float32. Of 16 shorter registers, 12 hold sums, or 8 those of both halves. More rows of
// bytes are faster, although registers must be spilled (measured on Zen 3 and 4).
#if defined(__AVX512F__)
constexpr int FLOAT_ROWS = 12, WIDE_ROWS = 12, BYTE_ROWS = 6;
#elif defined(__AVX2__)
constexpr int FLOAT_ROWS = 6, WIDE_ROWS = 2, BYTE_ROWS = 4;
#else
constexpr int FLOAT_ROWS = 2, WIDE_ROWS = 2, BYTE_ROWS = 4;
#endif
constexpr int WORD_ROWS = 6;
constexpr int LINE = 64;
constexpr int PIECE = 64;  // as in weights.py; other pieces take a more general loop
// In bytes, the rows of x that are multiplied with a panel while both are in the L2 cache.
constexpr int64_t X_BLOCK_BYTES = 512 << 10;
// With fewer multiplications than this, one thread is done before another begins.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 15;

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

// Adds up the products of a piece in words. None overflows: with the sum that a piece begins with,
// it is a sum of 32 products of a code − 8 and a code of x.
struct Int4InWords : Int4 {
    static constexpr int MAX_ROWS = WORD_ROWS, MAX_WIDE_ROWS = WIDE_ROWS;
    static I32s add(I32s total, U32s w, U32s x) { return add_to_words(total, w, x); }
    static I32s finish(I32s total) { return add_words(total); }
};

bool adds_in_words(const Weight& weight) {
    return ADDS_TO_WORDS && weight.kind == Kind::INT4 && !weight.zeros && weight.piece <= PIECE;
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

struct Block {
    const char* panel;
    const float* scales;    // [groups, PANEL], or null
    const int32_t* zeros;   // [groups, PANEL], or null
    const float* bias;      // [PANEL], or null
    int64_t groups, steps;  // steps per group
    int64_t pieces, piece_steps;  // of all groups; steps per piece
    int64_t stride;         // of x
    int64_t out_stride, columns;
    // Of a tile:
    const uint32_t* x = nullptr;       // of the first row
    const int32_t* sums = nullptr;     // [rows, pieces]
    const float* x_scales = nullptr;   // [rows, pieces]
    float* out = nullptr;
    const char* ahead = nullptr;  // memory to fetch meanwhile, `pace` bytes per step
    int64_t pace = 0;
};

inline void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

// Adds the products of `count` steps of a panel's halves START, ..., from step `first` on.
template <class K, int START, int ROWS, int HALVES, class Count>
inline void add_steps(const Block& block, int64_t first, Count count,
                      typename K::Sum (&sums)[ROWS][HALVES]) {
    const char* step = block.panel + first * K::BYTES;
    const uint32_t* x = block.x + first * K::WORDS;
    // Of what is fetched ahead, a half of a panel fetches a half.
    constexpr int PARTS = 2 / HALVES, LINES = std::max(K::BYTES / LINE / PARTS, 1);
    const int64_t pace = block.pace / PARTS, line_pace = pace / LINES;
    const char* ahead = block.ahead + (START * block.groups * block.steps + first) * pace;
    for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 16
        for (int line = 0; line < LINES; line++) fetch(ahead + line * line_pace);
        ahead += pace;
#pragma GCC unroll 16
        for (int word = 0; word < K::WORDS; word++) {
            U32s w[HALVES];
#pragma GCC unroll 16
            for (int half = 0; half < HALVES; half++)
                w[half] = settled(K::load(step, word, START + half));
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) {
                const U32s factor = splat(x[row * block.stride + word]);
#pragma GCC unroll 16
                for (int half = 0; half < HALVES; half++)
                    sums[row][half] = settled(K::add(sums[row][half], w[half], factor));
            }
        }
        step += K::BYTES;
        x += K::WORDS;
    }
}

template <class K, int START, int ROWS, int HALVES>
inline void multiply_floats(const Block& block, F32s (&totals)[ROWS][HALVES]) {
    for (int64_t group = 0; group < block.groups; group++) {
        F32s sums[ROWS][HALVES] = {};
        add_steps<K, START>(block, group * block.steps, block.steps, sums);
        for (int half = 0; half < HALVES; half++) {
            const float* scales = block.scales + group * PANEL + (START + half) * LANES;
            const F32s scale = block.scales ? load<F32s>(scales) : splat(1.0f);
            for (int row = 0; row < ROWS; row++)
                totals[row][half] = group || block.scales
                                        ? fma(sums[row][half], scale, totals[row][half])
                                        : sums[row][half];
        }
    }
}

// `PLAIN`: there is one group, without zeros, and all pieces have `PIECE` inputs.
template <class K, int START, bool PLAIN, int ROWS, int HALVES>
inline void multiply_pieces(const Block& block, F32s (&totals)[ROWS][HALVES]) {
    const int64_t steps = block.groups * block.steps;
    int64_t group = 0, group_end = block.steps;
    for (int64_t piece = 0, first = 0; piece < block.pieces; piece++, first += block.piece_steps) {
        if (!PLAIN && first >= group_end) {
            group++;
            group_end += block.steps;
        }
        I32s sums[ROWS][HALVES];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
            for (int half = 0; half < HALVES; half++)
                sums[row][half] = splat(block.sums[row * block.pieces + piece]);
        if (!PLAIN && block.zeros)
#pragma GCC unroll 16
            for (int half = 0; half < HALVES; half++) {
                const auto zero = load<I32s>(block.zeros + group * PANEL + (START + half) * LANES);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) sums[row][half] *= -zero;
            }
        if constexpr (PLAIN) {
            constexpr std::integral_constant<int64_t, PIECE / K::INPUTS> ALL;
            add_steps<K, START>(block, first, ALL, sums);
        } else {
            add_steps<K, START>(block, first, std::min(block.piece_steps, steps - first), sums);
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const F32s x_scale = splat(block.x_scales[row * block.pieces + piece]);
#pragma GCC unroll 16
            for (int half = 0; half < HALVES; half++) {
                F32s factor = x_scale;
                if (!PLAIN && block.groups > 1)
                    factor *= load<F32s>(block.scales + group * PANEL + (START + half) * LANES);
                const I32s sum = K::finish(sums[row][half]);
                totals[row][half] = fma(to_floats(sum), factor, totals[row][half]);
            }
        }
    }
}

template <class K, int START, int ROWS, int HALVES>
inline void multiply_integers(const Block& block, F32s (&totals)[ROWS][HALVES]) {
    constexpr bool MAY_BE_PLAIN = std::is_same_v<K, Int8>;  // others rarely have one group
    if (MAY_BE_PLAIN && block.groups == 1 && !block.zeros &&
        block.piece_steps * K::INPUTS == PIECE && block.steps % block.piece_steps == 0)
        multiply_pieces<K, START, MAY_BE_PLAIN>(block, totals);
    else
        multiply_pieces<K, START, false>(block, totals);
    if (block.groups == 1)
#pragma GCC unroll 16
        for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++)
                totals[row][half] *= load<F32s>(block.scales + (START + half) * LANES);
}

// Multiplies ROWS rows with a panel's halves START, ..., START + HALVES − 1.
template <class K, int ROWS, int START, int HALVES>
[[gnu::noinline]] void multiply(const Block& block) {
    F32s totals[ROWS][HALVES] = {};
    if constexpr (IS_INTEGER<K>)
        multiply_integers<K, START>(block, totals);
    else
        multiply_floats<K, START>(block, totals);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < HALVES; half++) {
            const int64_t column = (START + half) * LANES;
            F32s result = totals[row][half];
            if (block.bias) result += load<F32s>(block.bias + column);
            if (block.columns > column)
                store_first(block.out + row * block.out_stride + column, result,
                            block.columns - column);
        }
}

template <class K, int ROWS = K::MAX_ROWS>
void multiply_rows(int rows, const Block& block) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_rows<K, ROWS - 1>(rows, block);
    if constexpr (ROWS <= K::MAX_WIDE_ROWS) {
        multiply<K, ROWS, 0, 2>(block);
    } else {
        multiply<K, ROWS, 0, 1>(block);
        multiply<K, ROWS, 1, 1>(block);
    }
}

int64_t panels_of(const Weight& weight) { return ceil_div(weight.out, PANEL); }

// Multiplies rows [first, end) with a panel, and meanwhile fetches `bytes` from `ahead` on.
template <class K>
void multiply_panel(const Weight& weight, int64_t panel, int64_t first, int64_t end,
                    const ProductArgs& args, const char* ahead, int64_t bytes) {
    const int64_t steps = ceil_div(weight.in / weight.groups, K::INPUTS);
    const int64_t panel_steps = steps * weight.groups, column = panel * PANEL;
    const int64_t columns = std::min<int64_t>(PANEL, weight.out - column);
    float bias[PANEL] = {};
    const float* of_panel = weight.bias ? weight.bias + column : nullptr;
    if (of_panel && columns < PANEL) {
        std::memcpy(bias, of_panel, columns * sizeof(float));
        of_panel = bias;
    }
    Block block{
        .panel = weight.codes + panel * panel_steps * K::BYTES,
        .scales = weight.scales ? weight.scales + panel * weight.groups * PANEL : nullptr,
        .zeros = weight.zeros ? weight.zeros + panel * weight.groups * PANEL : nullptr,
        .bias = of_panel,
        .groups = weight.groups,
        .steps = steps,
        .pieces = pieces_of(weight),
        .piece_steps = ceil_div(weight.piece, K::INPUTS),
        .stride = args.x.stride,
        .out_stride = weight.out,
        .columns = columns,
    };
    // Tiles of nearly equal size: small ones wait for the latency of their few sums.
    const int64_t tiles = ceil_div(end - first, K::MAX_ROWS);
    block.pace = bytes / (tiles * panel_steps);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = first + (end - first) * tile / tiles;
        const int64_t next_row = first + (end - first) * (tile + 1) / tiles;
        block.x = args.x.words + row * args.x.stride;
        block.sums = args.x.sums + row * block.pieces;
        block.x_scales = args.x.scales + row * block.pieces;
        block.out = args.out + row * weight.out + column;
        block.ahead = ahead + tile * panel_steps * block.pace;
        multiply_rows<K>(next_row - row, block);
    }
}

template <class K>
void product_of(const ProductArgs& args, Member& member) {
    const Weight& weight = *args.weight;
    const int64_t rows = *args.rows, panels = panels_of(weight);
    const int64_t row_bytes = 4 * words_of(weight);
    const int64_t most_rows = std::max<int64_t>(X_BLOCK_BYTES / row_bytes / K::MAX_ROWS, 1) * K::MAX_ROWS;
    const int64_t blocks = ceil_div(rows, most_rows), units = panels * blocks;
    const int64_t block_rows = padded(ceil_div(rows, blocks), K::MAX_ROWS);
    const int64_t panel_bytes = bytes_of_panel(weight);
    const auto multiply = [&](int64_t unit, int64_t following) {
        // The next panel is fetched while all rows are multiplied. Without that, the CPU would read
        // memory only during the first tile.
        const char* ahead = weight.codes + unit % panels * panel_bytes;
        int64_t bytes = 0;
        if (following < units) {
            ahead = weight.codes + following % panels * panel_bytes;
            bytes = panel_bytes;
        } else if (args.next) {
            ahead = args.next->codes + member.number * panel_bytes;
            bytes = panel_bytes;
        }
        const int64_t first = unit / panels * block_rows;
        multiply_panel<K>(weight, unit % panels, first, std::min(rows, first + block_rows), args,
                          ahead, bytes);
    };
    if (rows * weight.in * weight.out < PARALLEL_PRODUCTS)
        member.each(1, [&](int64_t) {
            for (int64_t unit = 0; unit < units; unit++) multiply(unit, unit + 1);
        });
    else
        member.each_ahead(units, multiply);
}

// Packing.

void pack_floats(const float* x, int64_t in, uint32_t* words) {
    std::memcpy(words, x, in * sizeof(float));
}

void pack_pairs(const float* x, int64_t in, uint32_t* words) {
    auto* numbers = reinterpret_cast<uint16_t*>(words);
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES) store(numbers + k, narrow(load<F32s>(x + k)));
    for (; k < in; k++) numbers[k] = narrow(x[k]);
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

// What the sums of a piece begin with, from the sums of its codes.
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

int64_t pieces_of(const Weight& weight) { return ceil_div(weight.in, weight.piece); }

template <class K>
static void pack_integers(const Weight& weight, const float* x, const Tops* tops, int64_t row,
                          const Packed& out) {
    const int64_t pieces = pieces_of(weight), words = words_of(weight);
    uint32_t* packed = out.words + row * out.stride;
    packed[words - 1] = 0;  // the last inputs of a step may be missing
    if (K::WORDS > 1) packed[words - 2] = 0;
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = piece * weight.piece;
        const int64_t size = std::min(weight.piece, weight.in - first);
        float top;
        if (tops)
            top = tops->data[row * tops->stride + (tops->first_input + first) / tops->piece];
        else
            top = largest_magnitude(x + first, size);
        const float factor = top > 0 ? 127.0f / top : 0.0f;
        auto* codes = reinterpret_cast<int8_t*>(packed) + first;
        const int64_t place = row * pieces + piece;
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

void product(const ProductArgs& args, Member& member) {
    with_kind(*args.weight, [&](auto kind) { product_of<decltype(kind)>(args, member); });
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
