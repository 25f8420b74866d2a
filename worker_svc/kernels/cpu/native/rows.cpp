#include "rows.h"

namespace nano {
namespace {

inline F32s load_vector(const Vector& vector, int64_t i) {
    if (vector.is_bfloat16) return widen(load<U16s>((const uint16_t*)vector.data + i));
    return load<F32s>((const float*)vector.data + i);
}

inline float number_of(const Vector& vector, int64_t i) {
    return vector.is_bfloat16 ? widen(((const uint16_t*)vector.data)[i])
                              : ((const float*)vector.data)[i];
}

void pack_to(const PackTo& pack, const float* x, int64_t row) {
    if (pack.weight) pack_row(*pack.weight, x, -1.0f, row, pack.out);
}

void add_row(float* total, const float* x, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(total + i, load<F32s>(total + i) + load<F32s>(x + i));
    for (; i < size; i++) total[i] += x[i];
}

void norm_row(const float* x, const Vector& weight, double eps, int64_t size, float* out) {
    F32s squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            F32s v = load<F32s>(x + i + part * LANES);
            squares[part] = fma(v, v, squares[part]);
        }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < size; i++) total = __builtin_fmaf(x[i], x[i], total);
    const float scale = float(1 / std::sqrt(total / double(size) + eps));
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, load<F32s>(x + i) * scale * load_vector(weight, i));
    for (; i < size; i++) out[i] = x[i] * scale * number_of(weight, i);
}

inline F32s silu_of(F32s gate) { return gate / (1.0f + exp(-gate)); }

void silu_row(const float* gate, const float* up, int64_t size, float* out) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store(out + i, silu_of(load<F32s>(gate + i)) * load<F32s>(up + i));
    if (i < size) {
        F32s last = {};
        std::memcpy(&last, gate + i, (size - i) * sizeof(float));
        last = silu_of(last);
        for (int lane = 0; i < size; i++, lane++) out[i] = last[lane] * up[i];
    }
}

// One column of a weight's panels, which is one row of W.
float element(const Weight& weight, const char* panel, int64_t group_words, int64_t k, int column) {
    const int64_t size = weight.in / weight.groups, group = k / size, within = k % size;
    const char* codes = panel + group * group_words;
    float value;
    switch (weight.kind) {
        case FLOAT32: value = ((const float*)codes)[within * PANEL + column]; break;
        case BFLOAT16:
            value = widen(((const uint16_t*)codes)[(within * LANES + column % LANES) * 2 +
                                                   column / LANES]);
            break;
        case BF16_PAIRS:
            value = widen(((const uint16_t*)codes)[(within / 2 * PANEL + column) * 2 + within % 2]);
            break;
        case INT8: value = ((const uint8_t*)codes)[(within / 4 * PANEL + column) * 4 + within % 4]; break;
        default: {
            uint8_t both = ((const uint8_t*)codes)[(within / 8 * PANEL + column) * 4 + within % 4];
            value = within % 8 < 4 ? both & 15 : both >> 4;
        }
    }
    return value;
}

void weight_row(const Weight& weight, int64_t row, float* out) {
    const int64_t panel_bytes = bytes_of_panel(weight), panel = row / PANEL;
    const int column = row % PANEL;
    const char* codes = weight.codes + panel * panel_bytes;
    const int64_t size = weight.in / weight.groups;
    for (int64_t group = 0; group < weight.groups; group++) {
        const int64_t place = (panel * weight.groups + group) * PANEL + column;
        const float zero = weight.zeros ? weight.zeros[place] : 0;
        const float scale = weight.scales ? weight.scales[place] : 1;
        for (int64_t k = group * size; k < (group + 1) * size; k++)
            out[k] = (element(weight, codes, panel_bytes / weight.groups, k, column) - zero) * scale;
    }
}

}  // namespace

void embed(const EmbedArgs& args, const Step& step, Member& member) {
    const int64_t size = args.weight->in;
    for (int64_t t; (t = member.take()) < step.tokens;) {
        const int32_t given = step.input_ids[t];
        const int64_t id = (given < 0 ? step.last_tokens[-1 - given] : given) - args.start;
        float* out = args.out + t * size;
        if (id >= 0 && id < args.count)
            weight_row(*args.weight, id, out);
        else
            std::memset(out, 0, size * sizeof(float));
    }
}

void norm(const NormArgs& args, const Step& step, Member& member) {
    const int64_t size = args.size, rows = *args.rows;
    for (int64_t row; (row = member.take()) < rows;) {
        const int64_t token = args.last_only ? step.query_starts[row + 1] - 1 : row;
        const float* x = args.x + token * size;
        if (args.residual) {
            add_row(args.residual + token * size, x, size);
            x = args.residual + token * size;
        }
        norm_row(x, args.weight, args.eps, size, args.out + row * size);
        pack_to(args.pack, args.out + row * size, row);
    }
}

void silu(const SiluArgs& args, Member& member) {
    const int64_t size = args.size, rows = *args.rows;
    for (int64_t row; (row = member.take()) < rows;) {
        const float* gate = args.gate_up + 2 * row * size;
        silu_row(gate, gate + size, size, args.out + row * size);
        pack_to(args.pack, args.out + row * size, row);
    }
}

void maxima(const MaximaArgs& args, Member& member) {
    const int64_t rows = *args.rows;
    for (int64_t row; (row = member.take()) < rows;)
        args.out[row] = largest_magnitude(args.x + row * args.size, args.size);
}

}  // namespace nano
