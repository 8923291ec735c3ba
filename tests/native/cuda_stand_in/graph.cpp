/* Capture into graphs, and their launches. Nodes run in the order of capture, which is one of the
 * orders that their dependencies allow. */
#include "stream.h"

#include <unistd.h>

#include <algorithm>

namespace {

void end(const std::shared_ptr<sim::Capture> &capture) {
    for (CUstream stream : sim::streams())
        if (stream->capture == capture) {
            stream->capture.reset();
            stream->captured = stream->joined = 0;
        }
}

bool all_joined(const std::shared_ptr<sim::Capture> &capture) {
    return std::all_of(sim::streams().begin(), sim::streams().end(), [&](CUstream stream) {
        return stream->capture != capture || stream == capture->origin ||
               stream->joined >= stream->captured;
    });
}

} // namespace

CUresult sim::refuse_captured(CUstream stream) {
    if (!stream->capture) return CUDA_SUCCESS;
    stream->capture->broken = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult sim::refuse_while_capturing() {
    for (CUstream stream : streams()) {
        if (!stream->capture) continue;
        bool everybody = stream->capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        bool relaxed = stream->capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
        if (!relaxed && (everybody || stream->capture->thread == gettid()))
            return refuse_captured(stream);
    }
    return CUDA_SUCCESS;
}

CUresult sim::capture_node(CUstream stream, NodeKind kind, Work work) {
    if (stream->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto node = std::make_shared<CUgraphNode_st>(CUgraphNode_st{kind, std::move(work)});
    stream->capture->graph->nodes.push_back(node);
    ++stream->captured;
    return CUDA_SUCCESS;
}

CUresult sim::capture_point(CUevent event, CUstream stream) {
    event->capture = stream->capture;
    event->captured_in = stream;
    event->captured = stream->captured;
    return CUDA_SUCCESS;
}

CUresult sim::capture_wait(CUstream stream, CUevent event) {
    if (!event->capture) { /* an event from outside cannot become part of the graph */
        stream->capture->broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (stream->capture && stream->capture != event->capture) {
        stream->capture->broken = event->capture->broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (event->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!stream->capture) {
        stream->capture = event->capture;
        stream->captured = stream->joined = 0;
    }
    if (stream == event->capture->origin)
        event->captured_in->joined = std::max(event->captured_in->joined, event->captured);
    return CUDA_SUCCESS;
}

API cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(context);
    if (!stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = std::make_shared<sim::Capture>(
        sim::Capture{new CUgraph_st, stream, mode, gettid()});
    return CUDA_SUCCESS;
}

API cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER(context);
    std::shared_ptr<sim::Capture> capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != gettid())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    bool joined = all_joined(capture);
    end(capture);
    if (!capture->broken && joined) {
        *graph = capture->graph;
        return CUDA_SUCCESS;
    }
    delete capture->graph;
    *graph = nullptr;
    return capture->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                           : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

API cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    ENTER(context);
    *status = !stream || !stream->capture ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->broken   ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                          : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    ENTER(init);
    if (nodes)
        for (size_t i = 0; i < *count; ++i)
            nodes[i] = i < graph->nodes.size() ? graph->nodes[i].get() : nullptr;
    *count = nodes ? std::min(*count, graph->nodes.size()) : graph->nodes.size();
    return CUDA_SUCCESS;
}

API cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    ENTER(init);
    switch (node->kind) {
    case sim::NodeKind::kernel: *type = CU_GRAPH_NODE_TYPE_KERNEL; break;
    case sim::NodeKind::copy: *type = CU_GRAPH_NODE_TYPE_MEMCPY; break;
    case sim::NodeKind::fill: *type = CU_GRAPH_NODE_TYPE_MEMSET; break;
    case sim::NodeKind::host: *type = CU_GRAPH_NODE_TYPE_HOST; break;
    }
    return CUDA_SUCCESS;
}

API cuGraphDestroy(CUgraph graph) {
    ENTER(init);
    delete graph;
    return CUDA_SUCCESS;
}

API cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long) {
    ENTER(context);
    *executable = new CUgraphExec_st{graph->nodes};
    return CUDA_SUCCESS;
}

API cuGraphExecDestroy(CUgraphExec executable) {
    ENTER(context);
    delete executable; /* launches in flight hold the nodes themselves */
    return CUDA_SUCCESS;
}

API cuGraphUpload(CUgraphExec, CUstream) {
    ENTER(context);
    return CUDA_SUCCESS;
}

API cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    ENTER(context);
    auto nodes = executable->nodes;
    if (stream && stream->capture) return sim::refuse_captured(stream);
    return sim::submit(stream, sim::NodeKind::kernel, [nodes] {
        for (auto &node : nodes)
            if (CUresult code = node->work()) return code;
        return CUDA_SUCCESS;
    });
}
