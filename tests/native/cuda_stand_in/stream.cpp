/* Streams and events.
 *
 * A lazy stream runs nothing until somebody waits: then exactly what that wait needs runs, in
 * order. So a missing wait shows as missing data every time, not once in a thousand runs. A query
 * that finds work undone runs one item and says "not ready", so that polling ends.
 */
#include "stream.h"

#include <algorithm>
#include <chrono>

namespace {

double now_seconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

bool known(CUstream stream) {
    auto &all = sim::streams();
    return std::find(all.begin(), all.end(), stream) != all.end();
}

sim::Point end_of(CUstream stream) { return {stream->queue, stream->queue->queued()}; }

CUresult run_item(sim::Queue &queue) {
    sim::Item item = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    CUresult code = item.wait.queue ? sim::run_until(item.wait) : sim::protect(item.work);
    ++queue.done;
    return code;
}

CUresult ask(const sim::Point &point) {
    if (sim::reached(point)) return CUDA_SUCCESS;
    CUresult code = run_item(*point.queue);
    return code == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : code;
}

/* The legacy stream waits for every blocking stream and runs at once. */
CUresult run_legacy(const sim::Work &work) {
    for (CUstream stream : sim::streams()) {
        if (!stream->blocking) continue;
        if (stream->capture) return sim::refuse_captured(stream), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        if (CUresult code = sim::run_until(end_of(stream))) return code;
    }
    return sim::protect(work);
}

} // namespace

std::vector<CUstream> &sim::streams() {
    static auto *all = new std::vector<CUstream>;
    return *all;
}

bool sim::reached(const Point &point) { return !point.queue || point.queue->done >= point.items; }

CUresult sim::run_until(const Point &point) {
    CUresult first = CUDA_SUCCESS;
    while (!reached(point)) {
        CUresult code = run_item(*point.queue);
        if (first == CUDA_SUCCESS) first = code;
    }
    return first;
}

CUresult sim::run_everything() {
    CUresult first = CUDA_SUCCESS;
    for (CUstream stream : streams()) {
        CUresult code = run_until(end_of(stream));
        if (first == CUDA_SUCCESS) first = code;
    }
    return first;
}

void sim::append(CUstream stream, Item item) {
    stream->queue->waiting.push_back(std::move(item));
    if (!profile().lazy) run_until(end_of(stream)); /* a failure is told by the next call */
}

CUresult sim::submit(CUstream stream, NodeKind kind, Work work) {
    if (!stream) {
        if (CUresult code = refuse_while_capturing())
            return code == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                       ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                       : code;
        return run_legacy(work);
    }
    if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) return capture_node(stream, kind, std::move(work));
    append(stream, {std::move(work), {}});
    return CUDA_SUCCESS;
}

API cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER(context);
    if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *stream = new CUstream_st{.blocking = flags != CU_STREAM_NON_BLOCKING};
    sim::streams().push_back(*stream);
    return CUDA_SUCCESS;
}

API cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int) {
    return cuStreamCreate(stream, flags);
}

API cuStreamDestroy(CUstream stream) {
    ENTER(context);
    if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = sim::run_until(end_of(stream)); /* what is queued is still done */
    auto &all = sim::streams();
    all.erase(std::find(all.begin(), all.end(), stream));
    delete stream;
    return code;
}

API cuStreamSynchronize(CUstream stream) {
    ENTER(context);
    if (!stream) return sim::submit(nullptr, sim::NodeKind::host, [] { return CUDA_SUCCESS; });
    if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult code = sim::refuse_captured(stream)) return code;
    return sim::run_until(end_of(stream));
}

API cuStreamQuery(CUstream stream) {
    ENTER(context);
    if (!stream) return CUDA_SUCCESS;
    if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult code = sim::refuse_captured(stream)) return code;
    return ask(end_of(stream));
}

API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
    ENTER(context);
    if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture || event->capture) return sim::capture_wait(stream, event);
    if (event->recorded.queue) sim::append(stream, {{}, event->recorded});
    return CUDA_SUCCESS;
}

API cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    ENTER(context);
    return sim::submit(stream, sim::NodeKind::host, [=] {
        function(data);
        return CUDA_SUCCESS;
    });
}

API cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER(context);
    *event = new CUevent_st{.timing = !(flags & CU_EVENT_DISABLE_TIMING)};
    return CUDA_SUCCESS;
}

API cuEventDestroy(CUevent event) {
    ENTER(context);
    delete event;
    return CUDA_SUCCESS;
}

API cuEventRecord(CUevent event, CUstream stream) {
    ENTER(context);
    if (!known(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) return sim::capture_point(event, stream);
    event->capture.reset();
    auto seconds = std::make_shared<double>(0);
    event->seconds = seconds;
    event->recorded = {stream->queue, stream->queue->queued() + 1};
    sim::append(stream, {[seconds] {
                             *seconds = now_seconds();
                             return CUDA_SUCCESS;
                         },
                         {}});
    return CUDA_SUCCESS;
}

API cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int) {
    return cuEventRecord(event, stream);
}

API cuEventSynchronize(CUevent event) {
    ENTER(context);
    if (event->capture) return event->capture->broken = true, CUDA_ERROR_CAPTURED_EVENT;
    return sim::run_until(event->recorded);
}

API cuEventQuery(CUevent event) {
    ENTER(context);
    if (event->capture) return event->capture->broken = true, CUDA_ERROR_CAPTURED_EVENT;
    return ask(event->recorded);
}

API cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    ENTER(context);
    if (!start->timing || !end->timing || !start->seconds || !end->seconds)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sim::reached(start->recorded) || !sim::reached(end->recorded)) return CUDA_ERROR_NOT_READY;
    *milliseconds = float((*end->seconds - *start->seconds) * 1e3);
    return CUDA_SUCCESS;
}
