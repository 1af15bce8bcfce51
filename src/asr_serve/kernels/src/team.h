// Threads that help one thread with its native calls.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace asr_serve {

// OpenMP's teams start and end together: where other programs use the cores, each parallel region waits until the
// system has run every thread. Here a thread that comes late finds less to do, or nothing, and nobody waits for it.
// So a long call takes this team; what runs between torch's operations borrows torch's own threads (decision 0001),
// because two pools would spin for the same cores.
class Team {
 public:
  using Function = void (*)(void* context);

  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    shared_->stop = true;
    wake();
  }

  // The calling thread's own.
  static Team& mine() {
    thread_local Team team;
    return team;
  }

  // Calls function(context) on this thread, and on up to threads - 1 others that start while it runs. Returns when
  // all have returned. The function shares the work out: it may be called once only, and then has to do all of it.
  void run(Function function, void* context, unsigned threads) {
    if (threads <= 1) return function(context);
    for (; helpers_ + 1 < threads && start(); ++helpers_) {}
    Shared& shared = *shared_;
    shared.function = function, shared.context = context;
    const uint64_t region = (shared.state.load(std::memory_order_relaxed) >> 32) + 1;
    shared.state.store(region << 32 | OPEN | uint64_t(threads - 1) << LIMIT, std::memory_order_release);
    wake();
    function(context);
    uint64_t state = shared.state.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
    for (int spins = 0; state & INSIDE; state = shared.state.load(std::memory_order_acquire))
      if (++spins > SPINS) shared.state.wait(state, std::memory_order_acquire);
      else pause();
  }

 private:
  // A state's bits: the number of the region, how many may help, whether one may still enter, how many are inside.
  static constexpr int LIMIT = 17;
  static constexpr uint64_t OPEN = 1 << 16, INSIDE = OPEN - 1, MOST = (1 << 15) - 1;
  static constexpr int SPINS = 1'000;

  struct Shared {
    std::atomic<uint64_t> state{0};
    std::atomic<uint32_t> regions{0};
    std::atomic<bool> stop{false};
    Function function = nullptr;
    void* context = nullptr;
  };

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void wake() {
    shared_->regions.fetch_add(1, std::memory_order_release);
    shared_->regions.notify_all();
  }

  // Returns false where the system has no more threads: the others do the work.
  bool start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
    bool started = true;
    try {
      std::thread(help, shared_).detach();  // a forked child has none of them, and must not wait for them
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  static void help(std::shared_ptr<Shared> shared) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; shared->regions.load(std::memory_order_acquire) == seen; ++spins)
        if (spins > SPINS) shared->regions.wait(seen, std::memory_order_acquire);
        else pause();
      seen = shared->regions.load(std::memory_order_acquire);
      if (shared->stop) return;
      enter(*shared);
    }
  }

  static void enter(Shared& shared) {
    uint64_t state = shared.state.load(std::memory_order_acquire);
    do {
      if (!(state & OPEN) || (state & INSIDE) >= (state >> LIMIT & MOST)) return;
    } while (!shared.state.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
    shared.function(shared.context);  // the caller stays in `run` while anybody is inside
    if (const uint64_t left = shared.state.fetch_sub(1, std::memory_order_acq_rel) - 1; !(left & (OPEN | INSIDE)))
      shared.state.notify_all();
  }

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  unsigned helpers_ = 0;
};

}  // namespace asr_serve
