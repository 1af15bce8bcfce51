// Flows that are expected, by SSRC and by source, with a token bucket each: what is in front of everything else, so that a
// flood of others costs neither Python nor the interpreter's lock. Source: RFC 3550, section 5.1.
#pragma once

#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace packets {

constexpr size_t MAX_ENDED = 4096;  // SSRCs of flows that have ended, remembered
constexpr size_t RTCP_SOURCES = 4096;  // token buckets of RTCP, a power of two; an address has one of them
constexpr size_t ADDRESS_BYTES = 16;
constexpr size_t KEY_BYTES = 18;  // an IPv6 address, or IPv4 mapped into one, and a port in network order
using Key = std::array<char, KEY_BYTES>;

struct KeyHash {
  size_t operator()(const Key& key) const { return std::hash<std::string_view>()({key.data(), KEY_BYTES}); }
};

inline int64_t now_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

struct Counts {
  uint64_t received = 0, unknown_source = 0, over_rate = 0, truncated = 0, not_rtp = 0, checksum = 0;
};

// Datagram of a flow. `data` lies in the receiver's memory.
struct Accepted {
  uint64_t flow;
  Key source;
  const uint8_t* data;
  uint32_t bytes;
  int64_t arrival_ns;
};

class FlowTable {
 public:
  Counts counts;
  // Held while a batch is sorted; flows come and go in other threads.
  std::mutex mutex;

  void admit_ssrc(uint64_t flow, uint32_t ssrc, const Key* source, double per_s, double burst) {
    std::lock_guard lock(mutex);
    add(flow, source, per_s, burst);
    by_ssrc_[ssrc] = flow;
    ended_.erase(ssrc);
  }
  void admit_source(uint64_t flow, const Key& source, double per_s, double burst) {
    std::lock_guard lock(mutex);
    add(flow, nullptr, per_s, burst);
    Source& named = by_source_[source];
    named.flow = flow;
    named.admitted = true;
  }
  // RTCP that comes from anywhere is this flow's, until it is forgotten: so much in all, and so much of an address.
  void admit_rtcp(uint64_t flow, double per_s, double burst, double source_per_s, double source_burst) {
    std::lock_guard lock(mutex);
    add(flow, nullptr, per_s, burst);
    rtcp_flow_ = flow;
    rtcp_sources_.assign(RTCP_SOURCES, Bucket(source_per_s, source_burst));
  }
  void latch(uint64_t flow, const Key& source, uint32_t ssrc) {
    std::lock_guard lock(mutex);
    auto found = flows_.find(flow);
    if (found == flows_.end()) return;
    Flow& latched = found->second;
    if (latched.learned && latched.ssrc != ssrc) {  // one for each flow: a sender that changes it for ever adds nothing
      auto old = by_ssrc_.find(latched.ssrc);
      if (old != by_ssrc_.end() && old->second == flow) by_ssrc_.erase(old);
    }
    latched.learned = by_ssrc_.emplace(ssrc, flow).second || (latched.learned && latched.ssrc == ssrc);
    latched.ssrc = ssrc;
    if (latched.pinned && latched.source != source) leave(latched.source, flow);
    latched.pinned = true;
    latched.source = source;
    auto [at, is_new] = by_source_.emplace(source, Source{flow});
    Source& here = at->second;
    if (!is_new && !here.latched.empty() && !here.latched.contains(flow)) here.shared = true;
    here.latched.insert(flow);
  }
  void forget(uint64_t flow) {
    std::lock_guard lock(mutex);
    flows_.erase(flow);
    if (rtcp_flow_ == flow) rtcp_flow_ = 0, rtcp_sources_ = {};
    std::erase_if(by_ssrc_, [&](const auto& each) {
      if (each.second != flow) return false;
      if (ended_.size() >= MAX_ENDED) ended_.clear();
      ended_.insert(each.first);
      return true;
    });
    for (auto at = by_source_.begin(); at != by_source_.end();) at = without(at->second, flow) ? by_source_.erase(at) : ++at;
  }

  // Datagrams of a flow that came too fast; 0 for one that is not there.
  uint64_t over_rate(uint64_t flow) {
    std::lock_guard lock(mutex);
    auto found = flows_.find(flow);
    return found == flows_.end() ? 0 : found->second.over_rate;
  }

  // Appends a datagram that a flow expects; counts why not. With the mutex held.
  void sort(const uint8_t* data, uint32_t bytes, const Key& source, int64_t arrival, int64_t now, std::vector<Accepted>& to) {
    if (bytes < 12 || data[0] >> 6 != 2) { ++counts.not_rtp; return; }
    const uint32_t ssrc = uint32_t(data[8]) << 24 | uint32_t(data[9]) << 16 | uint32_t(data[10]) << 8 | data[11];
    uint64_t id = 0;
    const unsigned kind = data[1] & 0x7f;
    const bool is_rtcp = rtcp_flow_ && kind >= 64 && kind < 96;
    Flow* flow = is_rtcp ? &flows_.at(id = rtcp_flow_) : find(ssrc, source, id);
    if (!flow) { ++counts.unknown_source; return; }
    // An address first: what one of them sends too fast uses up nothing of what all may send.
    if ((is_rtcp && !rtcp_sources_[address_index(source)].take(now)) || !flow->bucket.take(now)) {
      ++counts.over_rate;
      ++flow->over_rate;
      return;
    }
    to.push_back({id, source, data, bytes, arrival});
  }

 private:
  struct Bucket {
    double per_ns, burst, tokens;
    int64_t last_ns;

    Bucket(double per_s, double most) : per_ns(per_s * 1e-9), burst(most), tokens(most), last_ns(now_ns(CLOCK_MONOTONIC)) {}
    bool take(int64_t now) {
      tokens = std::min(burst, tokens + double(now - last_ns) * per_ns);
      last_ns = now;
      if (tokens < 1) return false;
      tokens -= 1;
      return true;
    }
  };
  struct Flow {
    bool pinned;  // to `source`; else any
    Key source;
    Bucket bucket;
    bool learned = false;  // whether `ssrc` is in the table because the sender uses it
    uint32_t ssrc = 0;
    uint64_t over_rate = 0;
  };
  // Whose packets with an SSRC that nobody expects are. None are anybody's once two flows have come from there: they may be
  // a third caller's, or those of a flow that has ended.
  struct Source {
    uint64_t flow = 0;      // 0: none
    bool admitted = false;  // by its source: any SSRC is the flow's
    bool shared = false;
    std::unordered_set<uint64_t> latched = {};
  };

  // Takes a flow out of a source; returns whether nothing is left of it.
  static bool without(Source& source, uint64_t flow) {
    source.latched.erase(flow);
    if (source.flow == flow) source.flow = 0, source.admitted = false;
    return source.latched.empty() && !source.flow;
  }
  void leave(const Key& key, uint64_t flow) {
    auto found = by_source_.find(key);
    if (found != by_source_.end() && without(found->second, flow)) by_source_.erase(found);
  }

  void add(uint64_t flow, const Key* source, double per_s, double burst) {
    flows_.insert_or_assign(flow, Flow{source != nullptr, source ? *source : Key{}, Bucket(per_s, burst)});
  }

  // The flow of an SSRC, if it expects this source or any; else that of the source; else that of its address.
  Flow* find(uint32_t ssrc, const Key& key, uint64_t& id) {
    if (auto named = by_ssrc_.find(ssrc); named != by_ssrc_.end())
      if (Flow* flow = expecting(id = named->second, key)) return flow;
    auto known = by_source_.find(key);
    if (known == by_source_.end()) {
      Key any = key;
      any[16] = any[17] = 0;
      known = by_source_.find(any);
      if (known == by_source_.end()) return nullptr;
    }
    const Source& source = known->second;
    if (!source.flow || source.shared || (!source.admitted && ended_.contains(ssrc))) return nullptr;
    return expecting(id = source.flow, key);
  }
  Flow* expecting(uint64_t id, const Key& key) {
    Flow& flow = flows_.at(id);
    return !flow.pinned || flow.source == key ? &flow : nullptr;
  }

  // Bucket of an address: by a hash that nobody outside can aim, so that few share one. Source: multiply-shift,
  // Dietzfelbinger et al. 1997.
  size_t address_index(const Key& source) const {
    uint64_t words[2];
    static_assert(sizeof words == ADDRESS_BYTES);
    std::memcpy(words, source.data(), sizeof words);
    uint64_t sum = hash_[0];
    for (int i = 0; i < 4; ++i) sum += hash_[size_t(i) + 1] * (words[i / 2] >> (i % 2 * 32) & 0xffff'ffff);
    return size_t(sum >> 32) & (RTCP_SOURCES - 1);
  }
  static std::array<uint64_t, 5> random_hash() {
    std::random_device device;
    std::array<uint64_t, 5> numbers;
    for (uint64_t& each : numbers) each = uint64_t(device()) << 32 | device();
    return numbers;
  }

  uint64_t rtcp_flow_ = 0;  // whose RTCP is; 0: it is as any datagram
  std::vector<Bucket> rtcp_sources_;
  const std::array<uint64_t, 5> hash_ = random_hash();
  std::unordered_map<uint64_t, Flow> flows_;
  std::unordered_map<uint32_t, uint64_t> by_ssrc_;
  std::unordered_map<Key, Source, KeyHash> by_source_;
  std::unordered_set<uint32_t> ended_;
};

}  // namespace packets
