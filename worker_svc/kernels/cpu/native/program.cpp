// Runs phases one after the other in one call. Python traces them from a model; see
// worker_svc/kernels/cpu/program.py.

#include <chrono>

#include "attention.h"
#include "experts.h"
#include "rows.h"

namespace nano {

// Seconds of a phase on the thread that calls `nano_run_timed`: 0 if the others did it without.
struct Times {
    double work;
    double wait;  // for the other members, after its own work; 0 after the last phase
};

namespace {

enum Phase : int64_t {
    EMBED, NORM, PACK, PRODUCT, ROPE_STORE, ATTEND, ACTIVATE, MAXIMA, SUM_SQUARES, SCALE_PARTS, CHOOSE,
    SORT, GATHER, COMBINE
};

struct Op {
    int64_t phase;
    const void* args;
};

void run_phase(const Op& op, const Step& step, Member& member) {
    switch (op.phase) {
        case EMBED: return embed(*(const EmbedArgs*)op.args, step, member);
        case NORM: return norm(*(const NormArgs*)op.args, step, member);
        case PACK: return pack(*(const PackArgs*)op.args, member);
        case PRODUCT: return product(*(const ProductArgs*)op.args, member);
        case ROPE_STORE: return rope_store(*(const RopeStoreArgs*)op.args, step, member);
        case ATTEND: return attend(*(const AttendArgs*)op.args, step, member);
        case ACTIVATE: return activate(*(const ActivateArgs*)op.args, member);
        case MAXIMA: return maxima(*(const MaximaArgs*)op.args, member);
        case SUM_SQUARES: return sum_squares(*(const PartsArgs*)op.args, member);
        case SCALE_PARTS: return scale_parts(*(const PartsArgs*)op.args, member);
        case CHOOSE: return choose(*(const ChooseArgs*)op.args, member);
        case SORT: return sort(*(const SortArgs*)op.args, member);
        case GATHER: return gather(*(const GatherArgs*)op.args, member);
        case COMBINE: return combine(*(const CombineArgs*)op.args, member);
    }
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace
}  // namespace nano

extern "C" void nano_run(nano::Team* team, int members, const nano::Op* ops, int64_t count,
                         const nano::Step* step) {
    team->run(members, count, [=](nano::Member& member, int64_t phase) {
        nano::run_phase(ops[phase], *step, member);
    });
}

// Does what `nano_run` does. Sets times [count], which are 0 before, too.
extern "C" void nano_run_timed(nano::Team* team, int members, const nano::Op* ops, int64_t count,
                               const nano::Step* step, nano::Times* times) {
    double last = nano::now();
    int64_t number = 0;
    team->run(members, count, [&](nano::Member& member, int64_t phase) {
        if (member.number) return nano::run_phase(ops[phase], *step, member);
        double begun = nano::now();
        if (phase) times[number].wait = begun - last;
        nano::run_phase(ops[phase], *step, member);
        last = nano::now();
        times[number = phase].work = last - begun;
    });
}

extern "C" int64_t nano_stride(const nano::Weight* weight) {
    return nano::stride_of(nano::words_of(*weight));
}
