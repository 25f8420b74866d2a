// Quantizes weights to integers in one pass, with results that equal those of
// weights/quantization/quantize.py to the last bit.
//
// In torch, many small operations, each on all cores, took most of the time of a first start.
#include <algorithm>
#include <cfloat>

#include "simd.h"
#include "team.h"

namespace nano {

struct QuantizeArgs {
    const float* weight;  // [rows, columns]
    int64_t rows, columns;
    float* scales;  // [rows, groups]
    int64_t groups;
    uint8_t* codes;  // [rows, columns], or in int4 [rows, columns / 2]
    double top;      // the largest code, besides in int4
    const float* divisors;  // of a group's largest magnitude, which give candidates for its scale
    int64_t num_divisors;
};

namespace {

constexpr int64_t UNIT_WEIGHTS = 1 << 16;  // that a member takes at once

typedef uint16_t Pairs __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(8)));

float inverse(float scale) { return std::fabs(scale) > FLT_MIN ? 1 / scale : 0; }

struct Extremes {
    float high, low;
};

Extremes extremes(const float* x, int64_t size) {
    F32s high = splat(-INFINITY), opposite = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        F32s some = load<F32s>(x + i);
        high = larger(some, high);
        opposite = larger(-some, opposite);
    }
    float top = largest(high), bottom = -largest(opposite);
    for (; i < size; i++) top = std::max(top, x[i]), bottom = std::min(bottom, x[i]);
    return {top, bottom};
}

void quantize_symmetrically(const QuantizeArgs& args, int64_t row) {
    const float* x = args.weight + row * args.columns;
    uint8_t* codes = args.codes + row * args.columns;
    auto [high, low] = extremes(x, args.columns);
    float scale = std::max(high, -low) / float(args.top), factor = inverse(scale);
    args.scales[row] = scale;
    for (int64_t i = 0; i < args.columns; i += LANES) {
        const int64_t count = args.columns - i;
        store_first(codes + i, low_bytes(nearest(load_first<F32s>(x + i, count) * factor)), count);
    }
}

// The nearest integers in [−8, 7], ties to even.
F32s int4_codes(F32s x, float factor) {
    const F32s shift = splat(12582912.0f);  // 1.5 · 2²³, beyond which float32 has no fractions
    F32s code = smaller(larger(x * factor, splat(-8.0f)), splat(7.0f));
    return (code + shift) - shift;
}

struct Fit {
    float products, squares;  // Σxq and Σq² of weights x and their codes q
};

// Adds in torch's order: first into 32 sums, then every eighth of these sums, then all.
Fit fit(const float* x, int64_t size, float factor) {
    F32s products[2] = {}, squares = {};
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        for (int half = 0; half < 2; half++) {
            F32s some = load<F32s>(x + i + half * LANES), code = int4_codes(some, factor);
            products[half] += some * code;
            squares = fma(code, code, squares);
        }
    }
    float parts[4][8], total = 0;
    std::memcpy(parts, products, sizeof parts);
    for (int i = 0; i < 8; i++) total += parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i];
    return {total, sum(squares)};
}

// The scale with the smallest sum of squared errors, as in weights/quantization/quantize.py.
float best_scale(const QuantizeArgs& args, const float* x, int64_t size) {
    auto [high, low] = extremes(x, size);
    float peak = high > -low ? -high : -low, best = 0, gain = 0;
    for (int64_t i = 0; i < args.num_divisors; i++) {
        auto [products, squares] = fit(x, size, inverse(peak / args.divisors[i]));
        float scale = products * inverse(squares);
        if (scale * products > gain) best = scale, gain = scale * products;
    }
    return best;
}

void quantize_int4(const QuantizeArgs& args, int64_t row) {
    const int64_t size = args.columns / args.groups;
    for (int64_t group = 0; group < args.groups; group++) {
        const int64_t start = row * args.columns + group * size;
        const float* x = args.weight + start;
        float scale = best_scale(args, x, size), factor = inverse(scale);
        args.scales[row * args.groups + group] = scale;
        for (int64_t i = 0; i < size; i += LANES) {
            F32s codes = int4_codes(load<F32s>(x + i), factor) + 8.0f;
            Pairs pairs = bits<Pairs>(low_bytes(convert<int32_t>(codes)));
            store(args.codes + (start + i) / 2,
                  __builtin_convertvector(pairs | pairs >> 4, Bytes));
        }
    }
}

template <class Quantize>
void run(Team* team, int members, const QuantizeArgs& args, const Quantize& quantize) {
    const int64_t unit = std::max(UNIT_WEIGHTS / args.columns, int64_t(1));
    team->run(members, [&](Member& member) {
        member.each(ceil_div(args.rows, unit), [&](int64_t number) {
            const int64_t begin = number * unit;
            for (int64_t row = begin; row < std::min(begin + unit, args.rows); row++)
                quantize(args, row);
        });
    });
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" void nano_quantize(Team* team, int members, const QuantizeArgs* args) {
    run(team, members, *args, quantize_symmetrically);
}

extern "C" void nano_quantize_int4(Team* team, int members, const QuantizeArgs* args) {
    run(team, members, *args, quantize_int4);
}
