#include "products.h"

#include <algorithm>

#include "product_kinds.h"

namespace nano {
namespace {

constexpr int LINE = 64;
// In bytes, the rows of x that are multiplied with a panel while both are in the L2 cache.
constexpr int64_t X_BLOCK_BYTES = 512 << 10;
// In bytes, the panels that a member takes at once if it only reads memory.
constexpr int64_t READ_BYTES = 256 << 10;
// With fewer multiplications than this, one thread is done before another begins.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 15;

struct Block {
    const char* panel;
    const float* scales;    // [groups, PANEL], or null
    const int32_t* zeros;   // [groups, PANEL], or null
    const float* bias;      // [PANEL], or null
    int64_t groups, steps;  // steps per group
    int64_t segments, segment_steps;  // of all groups; steps per segment
    int64_t stride;         // of x
    int64_t out_stride, columns;
    // Of a tile:
    const uint32_t* x = nullptr;       // of the first row
    const int32_t* sums = nullptr;     // [rows, segments]
    const float* x_scales = nullptr;   // [rows, segments]
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

// `PLAIN`: there is one group, without zeros, and all segments have `SEGMENT` inputs.
template <class K, int START, bool PLAIN, int ROWS, int HALVES>
inline void multiply_segments(const Block& block, F32s (&totals)[ROWS][HALVES]) {
    const int64_t steps = block.groups * block.steps;
    int64_t group = 0, group_end = block.steps;
    int64_t first = 0;
    for (int64_t segment = 0; segment < block.segments; segment++, first += block.segment_steps) {
        if (!PLAIN && first >= group_end) {
            group++;
            group_end += block.steps;
        }
        I32s sums[ROWS][HALVES];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
            for (int half = 0; half < HALVES; half++)
                sums[row][half] = splat(block.sums[row * block.segments + segment]);
        if (!PLAIN && block.zeros)
#pragma GCC unroll 16
            for (int half = 0; half < HALVES; half++) {
                const auto zero = load<I32s>(block.zeros + group * PANEL + (START + half) * LANES);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++) sums[row][half] *= -zero;
            }
        if constexpr (PLAIN) {
            constexpr std::integral_constant<int64_t, SEGMENT / K::INPUTS> ALL;
            add_steps<K, START>(block, first, ALL, sums);
        } else {
            add_steps<K, START>(block, first, std::min(block.segment_steps, steps - first), sums);
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const F32s x_scale = splat(block.x_scales[row * block.segments + segment]);
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
        block.segment_steps * K::INPUTS == SEGMENT && block.steps % block.segment_steps == 0)
        multiply_segments<K, START, MAY_BE_PLAIN>(block, totals);
    else
        multiply_segments<K, START, false>(block, totals);
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

// Multiplies rows [first, end) with a panel of matrix `group`, and meanwhile fetches `bytes` from
// `ahead` on.
template <class K>
void multiply_panel(const Weight& weight, int64_t group, int64_t panel, int64_t first, int64_t end,
                    const ProductArgs& args, const char* ahead, int64_t bytes) {
    const int64_t steps = ceil_div(weight.in / weight.groups, K::INPUTS);
    const int64_t panel_steps = steps * weight.groups, column = panel * PANEL;
    const int64_t columns = std::min<int64_t>(PANEL, weight.out - column);
    const int64_t place = group * panels_of(weight) + panel;
    float bias[PANEL] = {};
    const float* of_panel = weight.bias ? weight.bias + column : nullptr;
    if (of_panel && columns < PANEL) {
        std::memcpy(bias, of_panel, columns * sizeof(float));
        of_panel = bias;
    }
    Block block{
        .panel = weight.codes + place * panel_steps * K::BYTES,
        .scales = weight.scales ? weight.scales + place * weight.groups * PANEL : nullptr,
        .zeros = weight.zeros ? weight.zeros + place * weight.groups * PANEL : nullptr,
        .bias = of_panel,
        .groups = weight.groups,
        .steps = steps,
        .segments = segments_of(weight),
        .segment_steps = ceil_div(weight.segment, K::INPUTS),
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
        block.sums = args.x.sums + row * block.segments;
        block.x_scales = args.x.scales + row * block.segments;
        block.out = args.out + row * weight.out + column;
        block.ahead = ahead + tile * panel_steps * block.pace;
        multiply_rows<K>(next_row - row, block);
    }
}

// The units of a product: for each group of rows, for each block of these, all panels.
struct Units {
    Groups groups;
    int64_t panels, most_rows;  // of a block
    int64_t group = 0, first = 0;  // the group of the last unit found, and its first unit

    int64_t rows() const { return groups.starts[group + 1] - groups.starts[group]; }
    int64_t blocks() const { return ceil_div(rows(), most_rows); }

    // Moves to the group of a unit, which is not before the last one.
    void find(int64_t unit) {
        for (; unit >= first + panels * blocks(); group++) first += panels * blocks();
    }

    int64_t panel(int64_t unit) const { return (unit - first) % panels; }

    int64_t count() const {
        Units each = *this;
        for (; each.group < groups.count; each.group++) each.first += panels * each.blocks();
        return each.first;
    }
};

const char* first_panel(const Weight& weight, const Groups& groups) {
    int64_t group = 0;
    if (groups.starts)
        while (group + 1 < groups.count && groups.starts[group + 1] == groups.starts[group]) group++;
    return weight.codes + group * panels_of(weight) * bytes_of_panel(weight);
}

template <class K>
void product_of(const ProductArgs& args, Member& member) {
    const Weight& weight = *args.weight;
    const int64_t rows = *args.rows, panels = panels_of(weight), whole[] = {0, rows};
    const int64_t row_bytes = 4 * words_of(weight), panel_bytes = bytes_of_panel(weight);
    const int64_t most_rows = std::max<int64_t>(X_BLOCK_BYTES / row_bytes / K::MAX_ROWS, 1) * K::MAX_ROWS;
    Units place{args.groups.starts ? args.groups : Groups{whole, 1}, panels, most_rows};
    const int64_t units = place.count();
    // With one row per matrix, a product takes as long as reading memory, which the CPU does fastest
    // by itself and in order: on Zen 4 by a fifth. But without AVX-512, unpacking 6 bits takes longer.
    constexpr bool MAY_READ = REGISTER_LANES > 8 || !std::is_same_v<K, Int6>;
    const bool reads = MAY_READ && rows <= place.groups.count;
    const int64_t max_chunk = std::min(READ_BYTES / panel_bytes, units / (4 * member.size));
    const int64_t chunk = reads ? std::max<int64_t>(max_chunk, 1) : 1;
    const auto multiply = [&](int64_t unit, int64_t following) {
        place.find(unit);
        // The next panel is fetched while several rows are multiplied. Without that, the CPU would
        // read memory only during the first tile.
        const char* ahead = weight.codes;
        int64_t bytes = 0;
        if (following < units && (!reads || place.rows() > 1)) {
            Units then = place;
            then.find(following);
            ahead += (then.group * panels + then.panel(following)) * panel_bytes;
            bytes = panel_bytes;
        } else if (following >= units && args.next) {
            ahead = first_panel(*args.next, args.next_groups) + member.number * chunk * panel_bytes;
            bytes = panel_bytes;
        }
        const int64_t block_rows = padded(ceil_div(place.rows(), place.blocks()), K::MAX_ROWS);
        const int64_t begin = place.groups.starts[place.group];
        const int64_t first = begin + (unit - place.first) / panels * block_rows;
        const int64_t end = std::min(begin + place.rows(), first + block_rows);
        multiply_panel<K>(weight, place.group, place.panel(unit), first, end, args, ahead, bytes);
    };
    if (rows * weight.in * weight.out < PARALLEL_PRODUCTS)
        member.each(1, [&](int64_t) {
            for (int64_t unit = 0; unit < units; unit++) multiply(unit, unit + 1);
        });
    else
        member.each_ahead(ceil_div(units, chunk), [&](int64_t number, int64_t next) {
            const int64_t end = std::min(units, (number + 1) * chunk);
            for (int64_t unit = number * chunk; unit < end; unit++)
                multiply(unit, unit + 1 < end ? unit + 1 : next * chunk);
        });
}

}  // namespace

void product(const ProductArgs& args, Member& member) {
    with_kind(*args.weight, [&](auto kind) { product_of<decltype(kind)>(args, member); });
}

}  // namespace nano
