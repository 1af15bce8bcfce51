// The ring under ThreadSanitizer: `make check` compiles and runs it. A producer and a consumer thread, every way to
// fill and to empty a slot mixed at random, rings from two slots up, so they are full and empty all the time, go round
// thousands of times, and both sides sleep. Every byte is checked; a wake-up that is lost is a deadlock, which the
// alarm ends.
//
//     g++ -std=c++20 -O1 -g -fsanitize=thread ring_stress.cpp -o ring_stress && ./ring_stress [slots to send]
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ring.hpp"

namespace {

using asr_serve::Ring;
using asr_serve::Slot;

constexpr unsigned TIMEOUT_S = 300;
constexpr uint64_t LAST = ~uint64_t(0);  // session of the message that ends it
constexpr uint64_t LONGEST_SLOTS = 12;   // of one message

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "ring_stress: %s\n", what);
  std::_Exit(1);
}

// As the socket pair is: writing never blocks, since a full bell is a rung bell, and a ring may come for nothing.
class Bell {
 public:
  Bell() {
    require(pipe(ends_) == 0, "no pipe");
    fcntl(ends_[1], F_SETFL, O_NONBLOCK);
  }
  ~Bell() { close(ends_[0]), close(ends_[1]); }
  void ring() { [[maybe_unused]] ssize_t sent = write(ends_[1], "!", 1); }
  void wait() {
    char heard[64];
    require(read(ends_[0], heard, sizeof heard) > 0, "the bell broke");
  }

 private:
  int ends_[2];
};

// The byte at a place of a message: whatever is read from another slot, lap or message is another one.
std::byte expected(uint64_t session, uint64_t at) {
  uint64_t mixed = (session * 0x9e3779b97f4a7c15u + at) * 0xbf58476d1ce4e5b9u;
  return std::byte(mixed >> 56);
}

void fill(std::byte* target, uint64_t bytes, uint64_t session, uint64_t at) {
  for (uint64_t i = 0; i < bytes; ++i) target[i] = expected(session, at + i);
}

void check(const std::byte* source, uint64_t bytes, uint64_t session, uint64_t at) {
  for (uint64_t i = 0; i < bytes; ++i) require(source[i] == expected(session, at + i), "a byte is wrong");
}

struct Both {
  void* memory;
  uint64_t bytes;
  Bell producer_bell{}, consumer_bell{};
  uint64_t producer_slept = 0, consumer_slept = 0;
};

// All of a message's slots are full but the last.
void send(Both& both, Ring& ring, uint64_t session, uint64_t bytes, bool in_place) {
  std::vector<std::byte> message(in_place ? 0 : bytes);
  fill(message.data(), message.size(), session, 0);
  for (uint64_t at = 0; at < bytes;) {
    uint64_t chunk = at / ring.payload_bytes();
    bool full = false;
    if (!in_place) {
      Ring::Moved moved = ring.write(session, chunk, message.data() + at, bytes - at);
      at += moved.bytes;
      if (moved.bell) both.consumer_bell.ring();
      full = at < bytes && !moved.bell;
    } else if (std::byte* payload = ring.lend()) {
      uint64_t used = std::min(bytes - at, ring.payload_bytes());
      fill(payload, used, session, at);
      at += used;
      if (ring.commit(session, chunk, used)) both.consumer_bell.ring();
    } else {
      full = true;
    }
    if (full && ring.producer_sleeps()) ++both.producer_slept, both.producer_bell.wait();
  }
}

void produce(Both& both, uint64_t slots_to_send) {
  Ring ring(both.memory, both.bytes);
  std::mt19937_64 random(ring.slots());
  uint64_t session = 0;
  for (uint64_t sent = 0; sent < slots_to_send; ++session) {
    uint64_t slots = random() % 2 ? 1 : LONGEST_SLOTS;
    uint64_t bytes = 1 + random() % (slots * ring.payload_bytes());
    send(both, ring, session, bytes, random() % 2);
    sent += (bytes + ring.payload_bytes() - 1) / ring.payload_bytes();
    if (random() % 64 == 0) std::this_thread::yield();
  }
  send(both, ring, LAST, 1, true);
}

void consume(Both& both) {
  Ring ring(both.memory, both.bytes);
  std::mt19937_64 random(ring.payload_bytes());
  std::vector<std::byte> target(LONGEST_SLOTS * ring.payload_bytes());
  uint64_t messages = 0, session = 0, chunk = 0, at = 0;
  while (session != LAST) {
    Slot* slot = ring.peek();
    if (!slot) {
      if (ring.consumer_sleeps()) ++both.consumer_slept, both.consumer_bell.wait();
      continue;
    }
    if (slot->chunk == 0) {
      require(slot->session == messages++ || slot->session == LAST, "a message is out of order");
      session = slot->session, chunk = 0, at = 0;
    }
    require(slot->session == session && slot->chunk == chunk, "a slot is out of order");
    uint64_t bytes = slot->used_bytes;
    bool bell;
    if (random() % 2) {
      check(slot->payload(), bytes, session, at);
      bell = ring.release();
    } else {
      uint64_t room = bytes + random() % (target.size() - bytes + 1);
      Ring::Moved moved = ring.read_into(session, chunk, target.data(), room);
      require(moved.bytes >= bytes && moved.bytes <= room, "read_into left a slot that fits");
      bytes = moved.bytes, bell = moved.bell;
      check(target.data(), bytes, session, at);
    }
    if (bell) both.producer_bell.ring();
    at += bytes, chunk += (bytes + ring.payload_bytes() - 1) / ring.payload_bytes();
    if (random() % 64 == 0) std::this_thread::yield();
  }
}

}  // namespace

int main(int arguments, char** argument) {
  uint64_t slots_to_send = arguments > 1 ? std::strtoull(argument[1], nullptr, 10) : 100'000;
  alarm(TIMEOUT_S);
  const uint64_t shapes[][2] = {{2, 64}, {4, 64}, {8, 192}, {64, 1024}, {1024, 256}};
  for (auto [slots, payload_bytes] : shapes) {
    uint64_t bytes = Ring::layout(slots, payload_bytes);
    std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(asr_serve::LINE, bytes), std::free);
    std::memset(memory.get(), 0xa5, bytes);
    Ring::format(memory.get(), bytes, slots, payload_bytes);
    Both both{.memory = memory.get(), .bytes = bytes};
    std::thread producer(produce, std::ref(both), slots_to_send), consumer(consume, std::ref(both));
    producer.join(), consumer.join();
    Ring ring(memory.get(), bytes);
    require(ring.depth() == 0, "something is left");
    std::printf("ring_stress: %llu slots of %llu bytes filled %llu times; producer slept %llu, consumer %llu times\n",
                (unsigned long long)slots, (unsigned long long)payload_bytes, (unsigned long long)slots_to_send,
                (unsigned long long)both.producer_slept, (unsigned long long)both.consumer_slept);
  }
}
