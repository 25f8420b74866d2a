#include "kv_store.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace nano {
namespace {

// Stores heads of a step's tokens. One member has one.
class Heads {
  public:
    Heads(const RopeStoreArgs& args, const Step& step)
        : args_(args), cache_(args.cache), step_(step), dim_(cache_.head_dim),
          numbers_(cache_.row_size()), codes_(4 * cache_.row_size()) {}

    // Stores a query or, from number `args.heads` on, a key and its value.
    void store_head(int64_t token, int64_t head) {
        const int64_t columns = args_.heads + 2 * cache_.kv_heads;
        const float* x = args_.qkv + (token * columns + head) * dim_;
        const float* rotation = args_.cos_sin + step_.positions[token] * dim_;
        if (head < args_.heads)
            return rotate(x, args_.q_weight, rotation,
                          args_.q + (token * args_.heads + head) * dim_);
        const int64_t place = step_.slots_in(args_.table)[token], kv_head = head - args_.heads;
        if (place < 0) return;
        const int64_t block = place / cache_.block_size, slot = place % cache_.block_size;
        rotate(x, args_.k_weight, rotation, numbers_.data());
        store_key(cache_.keys(block, kv_head), slot);
        std::copy_n(x + cache_.kv_heads * dim_, dim_, numbers_.data());
        store_value(cache_.values(block, kv_head), slot);
    }

  private:
    // Sets out [head_dim] to the head x, normalized if there is a weight, and rotated.
    void rotate(const float* x, const Vector& weight, const float* rotation, float* out) const {
        const int64_t half = dim_ / 2;
        F32s squares{};
        for (int64_t i = 0; i < dim_; i += LANES) {
            F32s a = load_first<F32s>(x + i, dim_ - i);
            squares = fma(a, a, squares);
        }
        const F32s scale = splat(float(1 / std::sqrt(double(sum(squares)) / dim_ + args_.eps)));
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t count = half - i;
            F32s a = load_first<F32s>(x + i, count), b = load_first<F32s>(x + half + i, count);
            F32s cos = load_first<F32s>(rotation + i, count);
            F32s sin = load_first<F32s>(rotation + half + i, count);
            if (weight.data) {
                a *= scale * load_first(weight, i, count);
                b *= scale * load_first(weight, half + i, count);
            }
            store_first(out + i, fma(a, cos, -(b * sin)), count);
            store_first(out + half + i, fma(b, cos, a * sin), count);
        }
    }

    void store_key(uint8_t* keys, int64_t slot) {
        const float scale = round(KEY_ZERO);
        const int64_t steps = ceil_div(dim_, cache_.depth());
        uint8_t* words = keys + 4 * (slot / LANES * steps * LANES + slot % LANES);
        for (int64_t i = 0; i < steps; i++) std::memcpy(words + 4 * LANES * i, &codes_[4 * i], 4);
        store_scale(keys, slot, scale);
    }

    void store_value(uint8_t* values, int64_t slot) {
        const float scale = round(0);
        const int64_t depth = cache_.depth();
        uint8_t* words = values + 4 * (slot / depth * cache_.row_size());
        if (depth == 1) put_codes<U32s>(words, 0);
        if (depth == 2) put_codes<U16s>(words, slot % 2);
        if (depth == 4) put_codes<U8s>(words, slot % 4);
        store_scale(values, slot, scale);
    }

    // Writes each code of a value to part of a word. The other bytes of the word belong to other
    // slots, which another thread may be writing.
    template <class Numbers>
    void put_codes(uint8_t* words, int64_t part) const {
        constexpr int SIZE = sizeof(Numbers) / LANES;
        for (int64_t i = 0; i < cache_.row_size(); i += LANES) {
            const uint8_t* codes = &codes_[SIZE * i];
#if defined(__AVX512BW__)
            constexpr uint64_t FIRST = SIZE == 4   ? 0xffffffffffffffff
                                       : SIZE == 2 ? 0x3333333333333333
                                                   : 0x1111111111111111;
            U32s whole = convert<uint32_t>(load<Numbers>(codes)) << (8 * SIZE * part);
            _mm512_mask_storeu_epi8(words + 4 * i, FIRST << (SIZE * part), (__m512i)whole);
#else
            for (int n = 0; n < LANES; n++)
                std::memcpy(words + 4 * (i + n) + SIZE * part, codes + SIZE * n, SIZE);
#endif
        }
    }

    // Rounds `numbers_` to codes of the cache's type -> the scale of int8 codes. Those have `zero`
    // added.
    float round(int zero) {
        const int64_t size = cache_.row_size();
        F32s tops{};
        for (int64_t i = 0; i < size; i += LANES)
            tops = larger(magnitude(load<F32s>(&numbers_[i])), tops);
        const float top = largest(tops), factor = top > 0 ? 127 / top : 0;
        for (int64_t i = 0; i < size; i += LANES) {
            const F32s numbers = load<F32s>(&numbers_[i]);
            if (cache_.type == FLOAT32) store(&codes_[4 * i], numbers);
            if (cache_.type == BFLOAT16) store(&codes_[2 * i], narrow(numbers));
            if (cache_.type == INT8)
                store(&codes_[i], low_bytes(nearest(numbers * factor) + zero));
        }
        return top / 127;
    }

    void store_scale(uint8_t* codes, int64_t slot, float scale) const {
        if (cache_.type == INT8) std::memcpy(codes + cache_.code_bytes() + 4 * slot, &scale, 4);
    }

    const RopeStoreArgs& args_;
    const Cache& cache_;
    const Step& step_;
    const int64_t dim_;
    std::vector<float> numbers_;  // of a key or value; 0 behind its end
    std::vector<uint8_t> codes_;
};

// The minimum number of heads that a member takes at once. They take about a microsecond.
constexpr int64_t UNIT_HEADS = 16;

}  // namespace

void rope_store(const RopeStoreArgs& args, const Step& step, Member& member) {
    const int64_t heads = args.heads + args.cache.kv_heads, all = step.tokens * heads;
    const int64_t unit = std::max(UNIT_HEADS, ceil_div(all, 8 * member.size));
    std::optional<Heads> store;
    member.each(ceil_div(all, unit), [&](int64_t number) {
        if (!store) store.emplace(args, step);
        for (int64_t i = number * unit; i < std::min((number + 1) * unit, all); i++)
            store->store_head(i / heads, i % heads);
    });
}

}  // namespace nano
