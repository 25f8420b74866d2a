// A unit of work is a tile of some queries of a key-value head. They are of one token in a decode
// and of several tokens in a prompt. A tile goes through the context CHUNK keys at a time. It keeps,
// per query, the largest score and the sum of the weights so far (online softmax: Milakov and
// Gimelshein, 2018, and Dao et al., "FlashAttention", 2022).
//
// The order of a query's sums does not depend on the rest of its tile or its step, and chunks begin
// at multiples of the same size. So a result depends only on the query's own context.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_kinds.h"
#include "register_blocks.h"

namespace nano {
namespace {

constexpr int CHUNK = 256;  // keys whose scores are computed at once
constexpr int64_t SPAN = 64;  // keys whose weights share a scale
// The floats from one row of scores to the next. With a power of two, all rows would compete for
// the same lines of the CPU's cache. The last vector of scores may end behind the chunk.
constexpr int SCORES = CHUNK + LANES;

// Rows of a sequence's key-value head, from `first_row` on. Row r is the head r % group of its
// group, for the query r / group.
struct Unit {
    int64_t sequence, kv_head, first_row;
};

int64_t chunk_of(const Cache& cache) {
    return cache.block_size < CHUNK ? CHUNK / cache.block_size * cache.block_size : CHUNK;
}

// Where the first chunk of a unit begins: that of the first key that its first row sees.
int64_t first_key(const AttendArgs& args, const Step& step, const Unit& unit) {
    const int64_t tokens = step.query_starts[unit.sequence + 1] - step.query_starts[unit.sequence];
    const int64_t before = step.context_lens[unit.sequence] - tokens;
    const int64_t position = before + unit.first_row * args.cache.kv_heads / args.heads;
    const int64_t chunk = chunk_of(args.cache);
    return std::max<int64_t>(position + 1 - args.window, 0) / chunk * chunk;
}

inline void fetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

template <class Kind>
class Tile {
  public:
    static constexpr int MAX_ROWS = Kind::MAX_ROWS;  // that a loop multiplies at once
    static constexpr int TILE_ROWS = 2 * MAX_ROWS;

    // Computes a unit. Meanwhile fetches the first keys of `next`, unless it has the same keys: the
    // pieces of a cache are too short for the CPU to fetch them ahead by itself.
    //
    // Not inlined, nor specialized: GCC would look up the thread's tile in each loop.
    [[gnu::noipa]]
    void attend(const AttendArgs& args, const Step& step, const Unit& unit, const Unit& next) {
        const Cache& cache = args.cache;
        const int64_t sequence = unit.sequence, kv_head = unit.kv_head, first_row = unit.first_row;
        const int64_t group = args.heads / cache.kv_heads, start = step.query_starts[sequence];
        const int64_t tokens = step.query_starts[sequence + 1] - start;
        const int64_t before = step.context_lens[sequence] - tokens;
        const auto blocks_of = [&](int64_t sequence) {
            return step.blocks_in(args.table, sequence);
        };
        const int32_t* blocks = blocks_of(sequence);
        const auto place = [&](int64_t row) {
            const int64_t token = start + (first_row + row) / group;
            const int64_t head = kv_head * group + (first_row + row) % group;
            return (token * args.heads + head) * cache.head_dim;
        };
        const auto visible = [&](int64_t row) { return before + (first_row + row) / group + 1; };

        rows_ = std::min<int64_t>(tokens * group - first_row, TILE_ROWS);
        resize(cache);
        for (int64_t row = 0; row < rows_; row++)
            for (int64_t i = 0; i < cache.head_dim; i += LANES)
                __builtin_prefetch(args.q + place(row) + i);
        for (int64_t row = 0; row < rows_; row++)
            pack(row, args.q + place(row), cache.head_dim, float(args.scale));
        const int64_t seen = visible(rows_ - 1);
        const int64_t chunk = chunk_of(cache);
        for (int64_t first = first_key(args, step, unit); first < seen; first += chunk) {
            gather(cache, blocks, kv_head, first, std::min(chunk, seen - first));
            next_vectors_ = 0;
            if (first + chunk < seen)
                look_ahead(cache, blocks, kv_head, first + chunk, seen);
            else if (next.sequence != sequence || next.kv_head != kv_head)
                look_ahead(cache, blocks_of(next.sequence), next.kv_head,
                           first_key(args, step, next), step.context_lens[next.sequence]);
            for (int64_t row = 0; row < rows_;) {
                // Of nearly equal sizes.
                const int64_t left = rows_ - row, rows = ceil_div(left, ceil_div(left, MAX_ROWS));
                with_constant<MAX_ROWS>(rows, [&](auto rows) {
                    score<rows>(row);
                    for (int64_t i = row; i < row + rows; i++)
                        soften(i, visible(i) - args.window - first,
                               std::min(visible(i) - first, size_));
                    weigh<rows>(row);
                });
                row += rows;
            }
        }
        for (int64_t row = 0; row < rows_; row++)
            write(row, args.out + place(row), cache.head_dim);
    }

  private:
    typedef typename Kind::Factor Factor;
    typedef typename Kind::Sums Sums;
    static constexpr int64_t SPAN_STEPS = Kind::SCALED ? SPAN / Kind::DEPTH : CHUNK;

    void resize(const Cache& cache) {
        steps_ = ceil_div(cache.head_dim, Kind::DEPTH);
        row_vectors_ = cache.row_size() / LANES;
        packed_.resize(row_vectors_ * LANES / Kind::DEPTH);
        factors_.resize(steps_ * TILE_ROWS);
        totals_.assign(rows_ * row_vectors_, F32s{});
        last_values_.resize(row_vectors_ * LANES);
    }

    void pack(int64_t row, const float* query, int64_t head_dim, float scale) {
        queries_[row] = Kind::pack(query, head_dim, scale, (uint8_t*)packed_.data());
        for (int64_t i = 0; i < steps_; i++) factors_[i * TILE_ROWS + row] = packed_[i];
        tops_[row] = -INFINITY;
        sums_[row] = F32s{};
    }

    // Finds the keys and values of a chunk of the context.
    void gather(const Cache& cache, const int32_t* blocks, int64_t kv_head, int64_t first,
                int64_t size) {
        const int64_t row_bytes = 4 * cache.row_size(), code_bytes = cache.code_bytes();
        size_ = size;
        vectors_ = groups_ = 0;
        const auto find = [&](int64_t done, int64_t block, int64_t slot, int64_t run) {
            const uint8_t* keys = cache.keys(block, kv_head);
            const uint8_t* values = cache.values(block, kv_head);
            for (int64_t i = 0; i < run; i += LANES) {
                keys_[vectors_] = keys + (slot + i) * steps_ * 4;
                vector_values_[vectors_] = values + (slot + i) / Kind::DEPTH * row_bytes;
                columns_[vectors_++] = done + i;
                if constexpr (Kind::SCALED) {
                    const int64_t scales = code_bytes + 4 * (slot + i);
                    store(key_scales_ + done + i, load<F32s>(keys + scales));
                    store(value_scales_ + done + i, load<F32s>(values + scales));
                }
            }
            for (int64_t i = 0; i < run; i += Kind::DEPTH)
                values_[groups_++] = values + (slot + i) / Kind::DEPTH * row_bytes;
        };
        each_run(cache, blocks, first, size, find);
        if constexpr (Kind::SCALED) {
            float* last = value_scales_ + size / LANES * LANES;
            store(last, first_lanes(load<F32s>(last), size % LANES, 0));
        }
        if constexpr (Kind::DEPTH == 2) {
            if (size % 2) hide_last_value(values_[groups_ - 1]);
        }
    }

    // Finds the keys of the next chunk, to be fetched, and fetches its scales. The context ends at
    // `end`.
    void look_ahead(const Cache& cache, const int32_t* blocks, int64_t kv_head, int64_t first,
                    int64_t end) {
        const auto find = [&](int64_t, int64_t block, int64_t slot, int64_t run) {
            const uint8_t* keys = cache.keys(block, kv_head);
            for (int64_t i = 0; i < run; i += LANES) {
                next_keys_[next_vectors_++] = keys + (slot + i) * steps_ * 4;
                if constexpr (Kind::SCALED) {
                    const int64_t scales = cache.code_bytes() + 4 * (slot + i);
                    fetch(keys + scales);
                    fetch(cache.values(block, kv_head) + scales);
                }
            }
        };
        each_run(cache, blocks, first, std::min(chunk_of(cache), end - first), find);
    }

    // Replaces the last words by words without the unused slot, whose value might be NaN.
    void hide_last_value(const uint8_t*& words) {
        for (size_t i = 0; i < last_values_.size(); i += LANES)
            store(&last_values_[i], load<U32s>(words + 4 * i) & 0xffff);
        words = (const uint8_t*)last_values_.data();
    }

    // Adds the products of WIDTH vectors of words with each row's factor.
    template <int ROWS, int WIDTH, class Words, class Factors, class Add>
    static inline void multiply(Sums (&sums)[ROWS][WIDTH], int64_t steps, const Words& words_at,
                                const Factors& factor_at, const Add& add) {
        for (int64_t step = 0; step < steps; step++) {
            U32s words[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; i++) words[i] = load<U32s>(words_at(step, i));
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const Factor* factor = factor_at(step, row);
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; i++) add(sums[row][i], words[i], factor);
            }
        }
    }

    // Computes the scores of ROWS rows and all keys of the chunk.
    template <int ROWS>
    void score(int64_t first_row) {
        in_blocks<width(ROWS, 4)>(vectors_, [&](auto width, int64_t vector) {
            constexpr int WIDTH = width;
            Sums sums[ROWS][WIDTH];
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; i++)
                    sums[row][i] = Kind::keys_start(queries_[first_row + row]);
            const Factor* factors = factors_.data() + first_row;
            const uint8_t *keys[WIDTH], *values[WIDTH];
            for (int i = 0; i < WIDTH; i++) {
                keys[i] = keys_[vector + i];
                values[i] = vector_values_[vector + i];
            }
            multiply(
                sums, steps_,
                [&](int64_t step, int i) {
                    fetch(values[i] + 4 * LANES * step);
                    return keys[i] + 4 * LANES * step;
                },
                [&](int64_t step, int row) { return factors + step * TILE_ROWS + row; },
                Kind::add_key);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
                for (int i = 0; i < WIDTH; i++) {
                    const int32_t column = columns_[vector + i];
                    F32s scales = Kind::SCALED ? load<F32s>(key_scales_ + column) : F32s{};
                    store(scores_[first_row + row] + column,
                          Kind::score(sums[row][i], queries_[first_row + row], scales));
                }
        });
    }

    // Turns a row's scores into weights, and those into factors in the same place. A key that the
    // row does not see, one of the first `hidden` or not of the first `visible`, has weight 0.
    void soften(int64_t row, int64_t hidden, int64_t visible) {
        float* scores = scores_[row];
        uint8_t* factors = (uint8_t*)scores;
        if (visible <= hidden) visible = 0;
        const int64_t seen = padded(std::max<int64_t>(visible, 0), LANES);
        if (visible > 0) {
            for (int64_t i = 0; i < hidden; i += LANES)
                store(scores + i, first_lanes(splat(-INFINITY), hidden - i, load<F32s>(scores + i)));
            F32s tops = splat(-INFINITY);
            for (int64_t i = 0; i < seen; i += LANES) {
                F32s x = load<F32s>(scores + i);
                if (i + LANES > visible)
                    store(scores + i, x = first_lanes(x, visible - i, -INFINITY));
                tops = larger(x, tops);
            }
            raise(row, largest(tops));
            F32s sums = sums_[row];
            for (int64_t i = 0; i < seen; i += SPAN)
                with_constant<SPAN / LANES>(std::min(SPAN, seen - i) / LANES, [&](auto count) {
                    constexpr int COUNT = count;
                    F32s weights[COUNT];
#pragma GCC unroll 8
                    for (int n = 0; n < COUNT; n++) {
                        weights[n] = exp(load<F32s>(scores + i + n * LANES) - tops_[row]);
                        sums += weights[n];
                    }
                    code_scales_[row][i / SPAN] =
                        Kind::put_weights(factors + i * sizeof(Factor) / Kind::DEPTH, weights,
                                          value_scales_ + i, visible - i);
                });
            sums_[row] = sums;
        }
        for (int64_t i = padded(seen, SPAN); i < size_; i += SPAN) code_scales_[row][i / SPAN] = 0;
        const int64_t end = ceil_div(size_, Kind::DEPTH);
        for (int64_t i = seen / Kind::DEPTH; i < end; i++)
            store(factors + i * sizeof(Factor), Factor{});
    }

    // Makes room for larger scores: scales what a row has summed up so far.
    void raise(int64_t row, float top) {
        if (!(top > tops_[row])) return;
        const float fading = exp(splat(tops_[row] - top))[0];
        sums_[row] *= fading;
        for (int64_t i = 0; i < row_vectors_; i++) totals_[row * row_vectors_ + i] *= fading;
        tops_[row] = top;
    }

    // Adds the weighted values of the chunk to the totals of ROWS rows.
    template <int ROWS>
    void weigh(int64_t first_row) {
        in_blocks<width(ROWS, 8)>(row_vectors_, [&](auto width, int64_t vector) {
            constexpr int WIDTH = width;
            constexpr int64_t STEPS = LANES / Kind::DEPTH;  // for 16 values
            F32s* totals = totals_.data() + first_row * row_vectors_ + vector;
            for (int64_t first = 0; first < groups_; first += SPAN_STEPS) {
                Sums sums[ROWS][WIDTH];
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; i++)
                        sums[row][i] = Kind::values_start(totals[row * row_vectors_ + i]);
                const auto* values = values_ + first;
                const uint8_t* factors = (const uint8_t*)scores_[first_row] + first * sizeof(Factor);
                multiply(
                    sums, std::min(SPAN_STEPS, groups_ - first),
                    [&](int64_t step, int i) {
                        const int64_t next = (first + step) / STEPS;
                        if (next < next_vectors_) {
                            const int64_t line = (first + step) % STEPS * row_vectors_ + vector + i;
                            fetch(next_keys_[next] + 4 * LANES * line);
                        }
                        return values[step] + 4 * LANES * (vector + i);
                    },
                    [&](int64_t step, int row) {
                        return (const Factor*)(factors + 4 * SCORES * row) + step;
                    },
                    Kind::add_value);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++) {
                    const float scale = code_scales_[first_row + row][first / SPAN_STEPS];
#pragma GCC unroll 8
                    for (int i = 0; i < WIDTH; i++) {
                        F32s& total = totals[row * row_vectors_ + i];
                        total = Kind::total(sums[row][i], scale, total);
                    }
                }
            }
        });
    }

    void write(int64_t row, float* out, int64_t head_dim) const {
        const float divisor = sum(sums_[row]);
        for (int64_t i = 0; i < row_vectors_; i++)
            store_first(out + LANES * i, totals_[row * row_vectors_ + i] / divisor,
                        head_dim - LANES * i);
    }

    int64_t rows_, steps_, row_vectors_;
    std::vector<Factor> packed_;   // of one query
    std::vector<Factor> factors_;  // [steps, TILE_ROWS], of queries
    typename Kind::Query queries_[TILE_ROWS];
    // Per row so far: the largest score, the sums of weights and of weighted values.
    float tops_[TILE_ROWS];
    F32s sums_[TILE_ROWS];
    std::vector<F32s> totals_;

    // Of a chunk: vectors of 16 keys, the columns of their scores, and groups of DEPTH values.
    int64_t size_, vectors_, groups_;
    const uint8_t* keys_[CHUNK];
    int32_t columns_[CHUNK];
    const uint8_t* values_[CHUNK];
    const uint8_t* vector_values_[CHUNK];  // the values of a vector of keys
    // Of the next chunk, if it has other keys:
    int64_t next_vectors_;
    const uint8_t* next_keys_[CHUNK];
    std::vector<uint32_t> last_values_;
    alignas(64) float key_scales_[SCORES], value_scales_[SCORES];
    alignas(64) float scores_[TILE_ROWS][SCORES];  // and then the factors of weights
    float code_scales_[TILE_ROWS][CHUNK / SPAN];  // of each span
};

template <class Kind>
void attend_tiles(const AttendArgs& args, const Step& step, Member& member) {
    constexpr int TILE_ROWS = Tile<Kind>::TILE_ROWS;
    static thread_local Tile<Kind> tile;
    const int64_t kv_heads = args.cache.kv_heads, group = args.heads / kv_heads;
    const auto tiles_of = [&](int64_t n) {
        return ceil_div((step.query_starts[n + 1] - step.query_starts[n]) * group, TILE_ROWS);
    };
    int64_t units = 0;
    for (int64_t n = 0; n < step.sequences; n++) units += tiles_of(n) * kv_heads;
    // Units of a sequence follow each other, so a member walks through the sequences once.
    int64_t sequence = 0, first = 0;
    member.each(units, [&](int64_t number) {
        const auto find = [&](int64_t number, int64_t& sequence, int64_t& first) -> Unit {
            while (number >= first + tiles_of(sequence) * kv_heads)
                first += tiles_of(sequence++) * kv_heads;
            const int64_t tiles = tiles_of(sequence), place = number - first;
            return {sequence, place / tiles, place % tiles * TILE_ROWS};
        };
        const Unit unit = find(number, sequence, first);
        int64_t next_sequence = sequence, next_first = first;
        const int64_t next = number + member.size;  // probably
        tile.attend(args, step, unit,
                    next < units ? find(next, next_sequence, next_first) : unit);
    });
}

}  // namespace

void attend(const AttendArgs& args, const Step& step, Member& member) {
    switch (args.cache.type) {
        case FLOAT32: return attend_tiles<Floats>(args, step, member);
        case BFLOAT16: return attend_tiles<Pairs>(args, step, member);
        case INT8: return attend_tiles<Codes>(args, step, member);
    }
}

}  // namespace nano
