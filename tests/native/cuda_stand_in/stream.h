/* Streams, events and graphs as structures. */
#pragma once

#include "stand_in.h"

#include <sys/types.h>

#include <deque>

namespace sim {

struct Queue;
struct Point { /* a place in a queue: reached when that many of its items are done */
    std::shared_ptr<Queue> queue;
    uint64_t items = 0;
};
struct Item {
    Work work;
    Point wait; /* instead of work */
};
struct Queue {
    std::deque<Item> waiting;
    uint64_t done = 0;
    uint64_t queued() const { return done + waiting.size(); }
};
CUresult run_until(const Point &point);
bool reached(const Point &point);
void append(CUstream stream, Item item);

/* One capture: the stream that began it and the ones that joined through events. */
struct Capture {
    CUgraph graph;
    CUstream origin;
    CUstreamCaptureMode mode;
    pid_t thread;
    bool broken = false;
};

} // namespace sim

struct CUgraphNode_st {
    sim::NodeKind kind;
    sim::Work work;
};

struct CUgraph_st {
    std::vector<std::shared_ptr<CUgraphNode_st>> nodes; /* in the order of capture */
};

struct CUgraphExec_st {
    std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
};

struct CUstream_st {
    bool blocking;
    std::shared_ptr<sim::Queue> queue = std::make_shared<sim::Queue>();
    std::shared_ptr<sim::Capture> capture;
    uint64_t captured = 0; /* nodes of this capture that came through this stream */
    uint64_t joined = 0;   /* how many of them the origin waits for */
};

struct CUevent_st {
    bool timing;
    sim::Point recorded; /* no queue: never recorded, nothing to wait for */
    std::shared_ptr<double> seconds;
    std::shared_ptr<sim::Capture> capture; /* recorded while capturing */
    CUstream captured_in = nullptr;
    uint64_t captured = 0;
};

namespace sim {
std::vector<CUstream> &streams();
CUresult capture_point(CUevent event, CUstream stream);
CUresult capture_wait(CUstream stream, CUevent event);
CUresult capture_node(CUstream stream, NodeKind kind, Work work);
/* 900 for a stream that captures, whose capture this breaks. */
CUresult refuse_captured(CUstream stream);
} // namespace sim
