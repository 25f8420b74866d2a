#include "rows.h"

#include <algorithm>
#include <vector>

namespace nano {
namespace {

// Has `compute` write a row, and packs it if that is asked for.
template <class Compute>
void compute_row(float* out, int64_t row, int64_t size, const PackTo& pack, const Compute& compute) {
    static thread_local std::vector<float> unread;  // stays in the cache of its core
    if (!out) unread.resize(size);
    float* x = out ? out + row * size : unread.data();
    compute(x);
    if (pack.weight) pack_row(*pack.weight, x, nullptr, row, pack.out);
}

void add_row(float* total, const float* x, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(total + i, load<F32s>(total + i) + load<F32s>(x + i));
    for (; i < size; i++) total[i] += x[i];
}

float squares_of(const float* x, int64_t size) {
    F32s squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            F32s v = load<F32s>(x + i + part * LANES);
            squares[part] = fma(v, v, squares[part]);
        }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < size; i++) total = __builtin_fmaf(x[i], x[i], total);
    return total;
}

// out = x / rms · weight, whose first number is the vector's number `first`.
void scale_row(const float* x, double mean_square, double eps, const Vector& weight, int64_t first,
               int64_t size, float* out) {
    const float scale = float(1 / std::sqrt(mean_square + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        const F32s some = load_first<F32s>(x + i, size - i) * scale;
        store_first(out + i, some * load_first(weight, first + i, size - i), size - i);
    }
}

inline F32s silu_of(F32s x) { return x / (1.0f + exp(-x)); }

// 0.5 · (1 + tanh(x)) is 1 / (1 + exp(-2x)).
inline F32s gelu_tanh_of(F32s x) {
    return x / (1.0f + exp(-2 * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

template <class Activate>
void activate_row(const float* gate, const float* up, int64_t size, float* out,
                  const Activate& activate) {
    for (int64_t i = 0; i < size; i += LANES) {
        const F32s some = activate(load_first<F32s>(gate + i, size - i));
        store_first(out + i, some * load_first<F32s>(up + i, size - i), size - i);
    }
}

void copy_row(const Vector& table, int64_t first, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += LANES)
        store_first(out + i, load_first(table, first + i, size - i), size - i);
}

}  // namespace

void embed(const EmbedArgs& args, const Step& step, Member& member) {
    const int64_t size = args.size;
    member.each(step.tokens, [&](int64_t t) {
        const int32_t given = step.input_ids[t];
        const int64_t id = (given < 0 ? step.last_tokens[-1 - given] : given) - args.start;
        float* out = args.out + t * size;
        if (id < 0 || id >= args.count)
            std::memset(out, 0, size * sizeof(float));
        else if (args.codes)
            row_of(*args.codes, id, out);
        else
            copy_row(args.table, id * size, size, out);
        if (args.scale != 1)
            for (int64_t i = 0; i < size; i++) out[i] *= float(args.scale);
    });
}

void norm(const NormArgs& args, const Step& step, Member& member) {
    const int64_t size = args.size, rows = *args.rows;
    member.each(rows, [&](int64_t row) {
        const auto place = [&](int64_t is_whole) {
            return (is_whole ? step.query_starts[row + 1] - 1 : row) * size;
        };
        const float* x = args.x + place(args.x_is_whole);
        if (args.residual) {
            float* total = args.residual + place(args.residual_is_whole);
            add_row(total, x, size);
            x = total;
        }
        compute_row(args.out, row, size, args.pack, [&](float* out) {
            if (!args.weight.data) return std::memcpy(out, x, size * sizeof(float)), void();
            const double mean_square = squares_of(x, size) / double(size);
            scale_row(x, mean_square, args.eps, args.weight, 0, size, out);
        });
    });
}

void sum_squares(const PartsArgs& args, Member& member) {
    member.each(*args.rows, [&](int64_t row) {
        const float* x = args.x + row * args.stride;
        for (int part = 0; part < 2; x += args.sizes[part++])
            args.squares[2 * row + part] = squares_of(x, args.sizes[part]);
    });
}

void scale_parts(const PartsArgs& args, Member& member) {
    member.each(*args.rows, [&](int64_t row) {
        float* x = args.x + row * args.stride;
        for (int64_t part = 0, first = 0; part < 2; first += args.sizes[part++])
            scale_row(x + first, args.squares[2 * row + part] / double(args.total_sizes[part]),
                      args.eps, args.weight, first, args.sizes[part], x + first);
    });
}

void activate(const ActivateArgs& args, Member& member) {
    const int64_t size = args.size, rows = *args.rows;
    member.each(rows, [&](int64_t row) {
        const float* gate = args.gate_up + 2 * row * size;
        compute_row(args.out, row, size, args.pack, [&](float* out) {
            if (args.activation == GELU_TANH)
                activate_row(gate, gate + size, size, out, gelu_tanh_of);
            else
                activate_row(gate, gate + size, size, out, silu_of);
        });
    });
}

void maxima(const MaximaArgs& args, Member& member) {
    const int64_t rows = *args.rows, size = args.size;
    member.each(rows, [&](int64_t row) {
        float* out = args.out + row * args.stride;
        std::memset(out, 0, args.stride * sizeof(float));
        for (int64_t k = 0; k < size;) {
            const int64_t segment = (args.first_input + k) / args.segment;
            const int64_t end = std::min(size, (segment + 1) * args.segment - args.first_input);
            out[segment] = largest_magnitude(args.x + row * size + k, end - k);
            k = end;
        }
    });
}

}  // namespace nano
