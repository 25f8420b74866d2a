#include "experts.h"

#include <algorithm>
#include <vector>

namespace nano {

void choose(const ChooseArgs& args, Member& member) {
    member.each(*args.rows, [&](int64_t row) {
        const float* logits = args.logits + row * args.experts;
        int32_t* chosen = args.chosen + row * args.per_token;
        float* factors = args.factors + row * args.per_token;
        for (int64_t i = 0; i < args.per_token; i++) {
            int32_t best = -1;
            for (int32_t expert = 0; expert < args.experts; expert++)
                if ((best < 0 || logits[expert] > logits[best]) &&
                    std::find(chosen, chosen + i, expert) == chosen + i)
                    best = expert;
            chosen[i] = best;
        }
        const auto weight_of = [&](int32_t expert) {
            return std::exp(double(logits[expert]) - logits[chosen[0]]);
        };
        double sum = 0;
        if (args.normalized)
            for (int64_t i = 0; i < args.per_token; i++) sum += weight_of(chosen[i]);
        else
            for (int32_t expert = 0; expert < args.experts; expert++) sum += weight_of(expert);
        for (int64_t i = 0; i < args.per_token; i++) factors[i] = float(weight_of(chosen[i]) / sum);
    });
}

void sort(const SortArgs& args, Member& member) {
    member.each(1, [&](int64_t) {
        const int64_t count = *args.rows * args.per_token;
        const auto own = [&](int64_t i) { return args.chosen[i] - args.first_expert; };
        const auto is_own = [&](int64_t i) { return own(i) >= 0 && own(i) < args.experts; };
        std::vector<int64_t> next(args.experts + 1);
        for (int64_t i = 0; i < count; i++)
            if (is_own(i)) next[own(i) + 1]++;
        for (int64_t expert = 0; expert < args.experts; expert++) next[expert + 1] += next[expert];
        std::copy(next.begin(), next.end(), args.starts);
        for (int64_t i = 0; i < count; i++)
            args.places[i] = is_own(i) ? int32_t(next[own(i)]++) : -1;
    });
}

void gather(const GatherArgs& args, Member& member) {
    const int64_t segments = segments_of(*args.weight), stride = args.x.stride;
    member.each(*args.rows, [&](int64_t row) {
        for (int64_t i = row * args.per_token; i < (row + 1) * args.per_token; i++) {
            const int64_t place = args.places[i];
            if (place < 0) continue;
            std::copy_n(args.x.words + row * stride, stride, args.out.words + place * stride);
            std::copy_n(args.x.sums + row * segments, segments, args.out.sums + place * segments);
            std::copy_n(args.x.scales + row * segments, segments, args.out.scales + place * segments);
        }
    });
}

void combine(const CombineArgs& args, Member& member) {
    const int64_t size = args.size;
    member.each(*args.rows, [&](int64_t row) {
        float* out = args.out + row * size;
        std::fill_n(out, size, 0.0f);
        for (int64_t i = row * args.per_token; i < (row + 1) * args.per_token; i++) {
            if (args.places[i] < 0) continue;
            const float* x = args.x + args.places[i] * size;
            for (int64_t k = 0; k < size; k++) out[k] += args.factors[i] * x[k];
        }
    });
}

}  // namespace nano
