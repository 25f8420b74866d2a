// The threads that run a step together.
//
// All members walk through the same phases. Between two phases they meet at a barrier; within one
// they take units of work from a counter. A member that waits spins for a moment, because a phase
// takes microseconds, and then yields its core, because other processes of the stack may need it.
#pragma once

#include <atomic>
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

class Team;

// One thread's place in a team during a run.
struct Member {
    Team& team;
    int number;  // 0 is the caller of `run`
    int size;    // members of this run
    uint32_t phase = 0;

    inline void barrier();
    // Takes the next unit of work of this phase: 0, 1, 2, ...
    inline int64_t take();
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

    // Has `members` threads, the caller among them, call `work`, and returns when all have returned.
    template <class Work>
    void run(int members, const Work& work) {
        members = members < 1 ? 1 : members > size_ ? size_ : members;
        arrived_.store(0, std::memory_order_relaxed);
        passed_.store(0, std::memory_order_relaxed);
        for (auto& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
        if (members > 1) {
            work_ = [&work](Member& member) { work(member); };
            left_.store(members - 1, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> lock(mutex_);
                uint64_t number = run_.load(std::memory_order_relaxed) / MAX_SIZE + 1;
                run_.store(number * MAX_SIZE + members, std::memory_order_release);
            }
            wake_.notify_all();
        }
        Member caller{*this, 0, members};
        work(caller);
        if (members > 1) wait([this] { return left_.load(std::memory_order_acquire) == 0; });
    }

  private:
    friend struct Member;
    static constexpr uint64_t MAX_SIZE = 1024, END = ~uint64_t(0);
    static constexpr int COUNTERS = 4;  // a phase's, and those of its neighbours

    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
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
            Member member{*this, number, members};
            work_(member);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::function<void(Member&)> work_;
    // The number of the run times MAX_SIZE, plus the number of its members; or END.
    alignas(64) std::atomic<uint64_t> run_{0};
    alignas(64) std::atomic<int> left_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> passed_{0};
    Counter counters_[COUNTERS];
};

inline void Member::barrier() {
    phase++;
    // Nobody takes from this counter before the next barrier, nor does anybody still.
    auto& counter = team.counters_[(phase + 1) % Team::COUNTERS].value;
    if (size == 1) {
        counter.store(0, std::memory_order_relaxed);
        return;
    }
    if (team.arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
        counter.store(0, std::memory_order_relaxed);
        team.arrived_.store(0, std::memory_order_relaxed);
        team.passed_.store(phase, std::memory_order_release);
        return;
    }
    Team::wait([this] { return team.passed_.load(std::memory_order_acquire) == phase; });
}

inline int64_t Member::take() {
    auto& counter = team.counters_[phase % Team::COUNTERS].value;
    return counter.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace nano
