// The threads that run a step together.
//
// All members walk through the same phases, and take units of a phase's work from a counter. A
// phase begins when all units of the last one are done, not when all members have arrived: one that
// the kernel has taken off its core between two units holds up nobody.
//
// A member that waits spins for a moment, because a phase takes microseconds, and then yields its
// core, because other processes of the stack may need it. One that works yields between two units
// every now and then, because the others would otherwise take its core within a unit.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace nano {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

class Team;

// One thread's place in a team during a run.
class Member {
  public:
    Member(Team& team, int number, int size) : number(number), size(size), team_(team) {}

    const int number;  // 0 is the caller of `run`
    const int size;    // members of this run

    // Waits for a phase that this member has not seen, and returns its number.
    inline int64_t next_phase();

    // Calls work(unit) for the units of this phase, of which there are `count`, that this member
    // takes.
    template <class Work>
    void each(int64_t count, const Work& work) {
        for (int64_t unit; (unit = take()) < count;) {
            work(unit);
            done_++;
            if (tired()) rest(count);
        }
        leave(count);
    }

    // Calls work(unit, next) with the unit that the member takes next, too. Before a rest it takes
    // none, and `next` is a guess. It is at least `count` at the end.
    template <class Work>
    void each_ahead(int64_t count, const Work& work) {
        for (int64_t unit = take(); unit < count;) {
            const bool rests = tired();
            int64_t next = rests ? unit + size : take();
            work(unit, next);
            done_++;
            if (rests) {
                rest(count);
                next = take();
            }
            unit = next;
        }
        leave(count);
    }

  private:
    static constexpr auto REST_AFTER = std::chrono::microseconds(200);
    static constexpr int WORK_PER_REST = 4;  // where other processes take long, rests are rarer

    inline int64_t take();
    // Reports the units that this member has done. Ends the phase if all its units are done.
    inline void report(int64_t count);
    inline void leave(int64_t count);
    // Whether this member should yield its core before it takes another unit.
    bool tired() const { return Clock::now() >= rest_; }
    inline void rest(int64_t count);

    Team& team_;
    int64_t phase_ = -1;
    int64_t done_ = 0;  // units of this phase that this member has done and not reported
    Clock::time_point rest_ = Clock::now() + REST_AFTER;
};

class Team {
  public:
    static constexpr int SPINS = 2000;

    explicit Team(int size) : size_(size < 1 ? 1 : size) {
        for (int number = 1; number < size; number++)
            threads_.emplace_back([this, number] { follow(number); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            run_.store(END);
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    // Has `members` threads, the caller among them, call `work` for each phase in turn, and returns
    // when all have returned.
    template <class Work>
    void run(int members, int64_t phases, const Work& work) {
        members = members < 1 ? 1 : members > size_ ? size_ : members;
        if (int64_t(phases_.size()) < phases) phases_ = std::vector<Phase>(phases);
        for (int64_t i = 0; i < phases; i++) {
            phases_[i].taken.store(0, std::memory_order_relaxed);
            phases_[i].done.store(0, std::memory_order_relaxed);
        }
        phase_.store(0, std::memory_order_relaxed);
        const auto walk = [&](Member& member) {
            for (int64_t phase; (phase = member.next_phase()) < phases;) work(member, phase);
        };
        if (members > 1) {
            work_ = walk;
            left_.store(members - 1, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> lock(mutex_);
                uint64_t number = run_.load(std::memory_order_relaxed) / MAX_SIZE + 1;
                run_.store(number * MAX_SIZE + members, std::memory_order_release);
            }
            wake_.notify_all();
        }
        Member caller(*this, 0, members);
        walk(caller);
        if (members > 1) wait([this] { return left_.load(std::memory_order_acquire) == 0; });
    }

    // Has them work on a single phase.
    template <class Work>
    void run(int members, const Work& work) {
        run(members, 1, [&](Member& member, int64_t) { work(member); });
    }

  private:
    friend class Member;
    static constexpr uint64_t MAX_SIZE = 1024, END = ~uint64_t(0);

    struct alignas(64) Phase {
        std::atomic<int64_t> taken{0}, done{0};  // units
    };

    template <class Condition>
    static void wait(const Condition& condition) {
        for (int spins = 0; !condition();) {
            if (spins < SPINS) {
                pause();
                spins++;
            } else {
                sched_yield();
            }
        }
    }

    void follow(int number) {
        uint64_t seen = 0;
        while (true) {
            // Between steps a member sleeps once a step has been over for a while.
            for (int spins = 0; run_.load(std::memory_order_acquire) == seen; spins++) {
                if (spins < SPINS) {
                    pause();
                } else {
                    std::unique_lock<std::mutex> lock(mutex_);
                    wake_.wait(lock, [&] { return run_.load() != seen; });
                }
            }
            seen = run_.load(std::memory_order_acquire);
            if (seen == END) return;
            int members = seen % MAX_SIZE;
            if (number >= members) continue;
            Member member(*this, number, members);
            work_(member);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::function<void(Member&)> work_;
    std::vector<Phase> phases_;
    // The number of the run times MAX_SIZE, plus the number of its members; or END.
    alignas(64) std::atomic<uint64_t> run_{0};
    alignas(64) std::atomic<int> left_{0};
    alignas(64) std::atomic<int64_t> phase_{0};  // all before it are done
};

inline int64_t Member::next_phase() {
    Team::wait([this] { return team_.phase_.load(std::memory_order_acquire) > phase_; });
    return phase_ = team_.phase_.load(std::memory_order_acquire);
}

inline int64_t Member::take() {
    return team_.phases_[phase_].taken.fetch_add(1, std::memory_order_relaxed);
}

inline void Member::report(int64_t count) {
    const int64_t mine = done_;
    done_ = 0;
    auto& done = team_.phases_[phase_].done;
    if (mine && done.fetch_add(mine, std::memory_order_acq_rel) + mine == count)
        team_.phase_.store(phase_ + 1, std::memory_order_release);
}

inline void Member::leave(int64_t count) {
    if (!count) done_ = count = 1;  // in a phase without units, the first to leave ends it
    report(count);
}

inline void Member::rest(int64_t count) {
    report(count);
    const auto begun = Clock::now();
    sched_yield();
    const auto ended = Clock::now();
    rest_ = ended + std::max<Clock::duration>(REST_AFTER, WORK_PER_REST * (ended - begun));
}

}  // namespace nano
