// A single-producer single-consumer ring of byte slots in memory that two processes share.
//
//   Shape | Producer | Consumer | producer sleeps | consumer sleeps | slot 0 | slot 1 | ...
//
// every part on cache lines of its own. A slot is a header of one line and `payload_bytes`; the slot at position n
// (positions count up for ever) is slot n % slots, and its sequence says whose it is: n, the producer may fill it;
// n + 1, the consumer may read it; n + slots, it has been read, and is free for position n + slots. So slot i starts
// at i, and there must be two at least: with one, "filled" and "free again" would be the same number.
//
// One thread produces and one consumes at any time; which ones may change. Neither ever waits for the other in here:
// where there is nothing to do, the sleep protocol tells who has to be woken, and the caller owns the bell.
// Plain C++: no Python, so that ring_stress.cpp runs it under ThreadSanitizer. ring_reference.py is the same in Python.
//
// Source: the sequence per slot is D. Vyukov's bounded queue.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>

namespace asr_serve {

constexpr uint64_t RING_MAGIC = 0x474e4952'4d435041;  // "APCMRING" in memory
constexpr uint64_t RING_VERSION = 1;
constexpr uint64_t LINE = 64;
constexpr uint64_t MAX_SLOTS = 1 << 20;
constexpr uint64_t MAX_PAYLOAD_BYTES = 1 << 28;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would live in one process only");

struct alignas(LINE) Slot {
  std::atomic<uint64_t> sequence;
  uint64_t session;
  uint64_t chunk;       // running number inside the message
  uint32_t used_bytes;  // of the payload
  uint32_t flags;       // 0: none are defined

  std::byte* payload() { return reinterpret_cast<std::byte*>(this + 1); }
};
static_assert(sizeof(Slot) == LINE);

class Ring {
 public:
  // Bytes of a ring. Throws invalid_argument for what cannot be one.
  static uint64_t layout(uint64_t slots, uint64_t payload_bytes) {
    if (slots < 2 || slots > MAX_SLOTS || (slots & (slots - 1)))
      throw std::invalid_argument("slots must be a power of two, 2 to 1048576");
    if (payload_bytes < LINE || payload_bytes > MAX_PAYLOAD_BYTES || payload_bytes % LINE)
      throw std::invalid_argument("payload_bytes must be a multiple of 64, 64 to 268435456");
    return sizeof(Shared) + slots * (sizeof(Slot) + payload_bytes);
  }

  // An empty ring in `memory`, whatever was there. Nobody may be attached.
  static void format(void* memory, uint64_t bytes, uint64_t slots, uint64_t payload_bytes) {
    if (layout(slots, payload_bytes) > bytes) throw std::invalid_argument("the buffer is smaller than the ring");
    expect_aligned(memory);
    auto* shared = new (memory) Shared{};
    for (uint64_t i = 0; i < slots; ++i) {
      auto* slot = new (static_cast<std::byte*>(memory) + sizeof(Shared) + i * (sizeof(Slot) + payload_bytes)) Slot{};
      slot->sequence.store(i, std::memory_order_relaxed);
    }
    shared->version = RING_VERSION, shared->slots = slots, shared->payload_bytes = payload_bytes;
    shared->magic.store(RING_MAGIC, std::memory_order_release);
  }

  // Attach to a formatted ring, as either side or only to look. Throws invalid_argument when it is none.
  Ring(void* memory, uint64_t bytes) : shared_(static_cast<Shared*>(memory)) {
    expect_aligned(memory);
    if (bytes < sizeof(Shared) || shared_->magic.load(std::memory_order_acquire) != RING_MAGIC)
      throw std::invalid_argument("no ring in this buffer: format it first");
    if (shared_->version != RING_VERSION)
      throw std::invalid_argument("a ring of another version: both processes must run the same release");
    slots_ = shared_->slots, payload_bytes_ = shared_->payload_bytes;
    if (layout(slots_, payload_bytes_) > bytes) throw std::invalid_argument("the buffer is smaller than its ring");
  }

  uint64_t slots() const { return slots_; }
  uint64_t payload_bytes() const { return payload_bytes_; }

  // Slots filled and not yet released; any process may ask.
  uint64_t depth() const {
    uint64_t tail = shared_->tail.load(std::memory_order_acquire);
    int64_t filled = int64_t(tail - shared_->head.load(std::memory_order_acquire));
    return uint64_t(std::clamp<int64_t>(filled, 0, int64_t(slots_)));  // the two were not read at once
  }

  // How often the producer found no room.
  uint64_t full_count() const { return shared_->full_count.load(std::memory_order_relaxed); }

  // --- the producer ---

  // The next slot's payload, to fill in place; null when the ring is full. The same one until `commit`.
  std::byte* lend() {
    Slot* slot = next_free(std::memory_order_acquire);
    if (!slot) return count_full(), nullptr;
    lent_ = true;
    return slot->payload();
  }

  // Publish what was lent. True: the consumer sleeps and wants the bell, asked once for every sleep.
  bool commit(uint64_t session, uint64_t chunk, uint64_t used_bytes) {
    if (!lent_) throw std::logic_error("commit without lend");
    if (used_bytes > payload_bytes_) throw std::invalid_argument("used_bytes is more than payload_bytes");
    uint64_t at = shared_->tail.load(std::memory_order_relaxed);
    Slot& slot = slot_at(at);
    slot.session = session, slot.chunk = chunk, slot.used_bytes = uint32_t(used_bytes), slot.flags = 0;
    slot.sequence.store(at + 1, std::memory_order_seq_cst);  // release, and in one order with the flag: see sleeps()
    shared_->tail.store(at + 1, std::memory_order_release);
    lent_ = false;
    return wakes(shared_->consumer_sleeps);
  }

  struct Moved {
    uint64_t bytes;
    bool bell;
  };

  // Copy in slot after slot until all is in, the ring is full, or the consumer wants the bell: it should be rung
  // before the rest is copied.
  Moved write(uint64_t session, uint64_t first_chunk, const std::byte* source, uint64_t bytes) {
    if (lent_) throw std::logic_error("write while a slot is lent");
    Moved moved{0, false};
    while (moved.bytes < bytes && !moved.bell) {
      std::byte* payload = lend();
      if (!payload) break;
      uint64_t used = std::min(bytes - moved.bytes, payload_bytes_);
      std::memcpy(payload, source + moved.bytes, used);
      moved.bell = commit(session, first_chunk++, used);
      moved.bytes += used;
    }
    return moved;
  }

  // Before the producer waits for room. False: there is some.
  bool producer_sleeps() {
    return sleeps(shared_->producer_sleeps, [this] { return next_free(std::memory_order_seq_cst) != nullptr; });
  }

  // --- the consumer ---

  // The oldest slot, to be read in place until `release`; null when the ring is empty.
  Slot* peek() {
    Slot* slot = next_ready(std::memory_order_acquire);
    if (!slot) return nullptr;
    if (slot->used_bytes > payload_bytes_) throw std::runtime_error("the ring is corrupt: a slot holds too much");
    peeked_ = true;
    return slot;
  }

  // Give the slot back. True: the producer sleeps and wants the bell, asked once for every sleep.
  bool release() {
    if (!peeked_) throw std::logic_error("release without peek");
    uint64_t at = shared_->head.load(std::memory_order_relaxed);
    slot_at(at).sequence.store(at + slots_, std::memory_order_seq_cst);
    shared_->head.store(at + 1, std::memory_order_release);
    peeked_ = false;
    return wakes(shared_->producer_sleeps);
  }

  // Copy out whole slots of this session, chunk after chunk, as long as they are there and fit; stops early when the
  // producer wants the bell. What was peeked at before is no longer lent.
  Moved read_into(uint64_t session, uint64_t first_chunk, std::byte* target, uint64_t bytes) {
    Moved moved{0, false};
    while (moved.bytes < bytes && !moved.bell) {
      Slot* slot = peek();
      if (!slot || slot->session != session || slot->chunk != first_chunk) break;
      uint64_t used = slot->used_bytes;
      if (used > bytes - moved.bytes) break;
      std::memcpy(target + moved.bytes, slot->payload(), used);
      moved.bytes += used;
      ++first_chunk;
      moved.bell = release();
    }
    return moved;
  }

  // Before the consumer waits for a slot. False: there is one.
  bool consumer_sleeps() {
    return sleeps(shared_->consumer_sleeps, [this] { return next_ready(std::memory_order_seq_cst) != nullptr; });
  }

 private:
  using Flag = std::atomic<uint64_t>;
  struct Shared {
    alignas(LINE) std::atomic<uint64_t> magic;
    uint64_t version, slots, payload_bytes;
    alignas(LINE) std::atomic<uint64_t> tail;  // positions filled
    std::atomic<uint64_t> full_count;
    alignas(LINE) std::atomic<uint64_t> head;  // positions released
    alignas(LINE) Flag producer_sleeps;
    alignas(LINE) Flag consumer_sleeps;
  };
  static_assert(sizeof(Shared) == 5 * LINE);

  static void expect_aligned(const void* memory) {
    if (reinterpret_cast<uintptr_t>(memory) % LINE)
      throw std::invalid_argument("the buffer must begin at a multiple of 64 bytes, as an mmap does");
  }

  Slot& slot_at(uint64_t position) {
    auto* first = reinterpret_cast<std::byte*>(shared_ + 1);
    return *reinterpret_cast<Slot*>(first + (position & (slots_ - 1)) * (sizeof(Slot) + payload_bytes_));
  }

  // `commit` and `release` hand the slot over and then move their cursor. Who was killed between the two left a
  // cursor one behind its slot; the next of that side to attach moves it on.
  Slot* next_free(std::memory_order order) {
    for (;;) {
      uint64_t at = shared_->tail.load(std::memory_order_relaxed);
      Slot& slot = slot_at(at);
      uint64_t sequence = slot.sequence.load(order);
      if (sequence == at) return &slot;
      if (sequence != at + 1 && sequence != at + slots_) return nullptr;
      shared_->tail.store(at + 1, std::memory_order_release);
    }
  }

  Slot* next_ready(std::memory_order order) {
    for (;;) {
      uint64_t at = shared_->head.load(std::memory_order_relaxed);
      Slot& slot = slot_at(at);
      uint64_t sequence = slot.sequence.load(order);
      if (sequence == at + 1) return &slot;
      if (sequence != at + slots_ && sequence != at + slots_ + 1) return nullptr;
      shared_->head.store(at + 1, std::memory_order_release);
    }
  }

  void count_full() {
    shared_->full_count.store(full_count() + 1, std::memory_order_relaxed);  // the producer is its only writer
  }

  // The sleeper raises its flag and then looks at the slot; the other side moves the slot and then looks at the
  // flag. All four are sequentially consistent, so at least one of them sees the other: no wake-up is lost.
  template <typename Work>
  static bool sleeps(Flag& flag, Work there_is_work) {
    flag.store(1, std::memory_order_seq_cst);
    if (!there_is_work()) return true;
    flag.store(0, std::memory_order_relaxed);
    return false;
  }

  static bool wakes(Flag& flag) {
    return flag.load(std::memory_order_seq_cst) && flag.exchange(0, std::memory_order_seq_cst);
  }

  Shared* shared_;
  uint64_t slots_, payload_bytes_;
  bool lent_ = false, peeked_ = false;
};

}  // namespace asr_serve
