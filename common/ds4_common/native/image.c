/* Opening an image: every extent is checked here, so that running needs no checks.
 *
 * The image may be hostile. Rules: no arithmetic on its numbers before they are bounded, no index
 * used before it is compared with its table.
 */
#include "image_check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MAX_RECORDS (1u << 20)

static int refuse(char *error, size_t error_bytes, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, error_bytes, format, arguments);
    va_end(arguments);
    return -1;
}

uint32_t ds4_image_abi(void) {
    /* FNV-1a over what lowering bakes into an image: formats and sizes of activation columns, op
     * numbers, and the layouts and formats of every type. */
    uint32_t hash = 2166136261u;
#define MIX(v) (hash = (hash ^ (uint32_t)(v)) * 16777619u)
    MIX(DS4_IMAGE_FORMAT);
    MIX(DS4_OP_KINDS);
    MIX(DS4_MAX_PARTS);
    for (int format = 0; format < 8; format++)
        for (int64_t cols = 256; cols <= 4096; cols *= 4) MIX(ds4_act_bytes(format, cols));
    for (uint32_t type = 0; type < 64; type++) {
        MIX(ds4_act_format(type));
        MIX(ds4_block_bytes(type));
        MIX(ds4_block_weights(type));
        for (uint32_t layout = 0; layout < 16; layout++) {
            MIX(ds4_matmul_kernel(type, layout, DS4_ISA_SCALAR) != NULL);
            MIX(ds4_row_granule(type, layout));
        }
    }
#undef MIX
    return hash;
}

/* The header's own numbers: capacities are divided by them before any table is looked at. */
static int check_header(const ds4_image_header *h, char *error, size_t error_bytes) {
    if (!h->vocabulary || h->vocabulary > MAX_RECORDS * 4 || !h->context_tokens ||
        h->context_tokens > DS4_MAX_CONTEXT)
        return refuse(error, error_bytes, "image: vocabulary %u or context %u out of range",
                      h->vocabulary, h->context_tokens);
    if (!h->page_tokens || h->page_tokens % 8 || h->page_tokens > 1024)
        return refuse(error, error_bytes,
                      "image: page of %u tokens, expected a multiple of 8 up to 1024",
                      h->page_tokens);
    if (h->token_bytes > (1ull << 32) || h->row_bytes > (1ull << 32) || h->token_bytes % 64 ||
        h->row_bytes % 64)
        return refuse(error, error_bytes, "image: scratch of %llu and %llu bytes per row",
                      (unsigned long long)h->token_bytes, (unsigned long long)h->row_bytes);
    return 0;
}

int ds4_image_map(const void *data, uint64_t bytes, uint64_t abi, ds4_image *image, char *error,
                  size_t error_bytes) {
    const ds4_image_header *h = data;
    if (bytes < sizeof *h)
        return refuse(error, error_bytes, "image: got %llu bytes, expected %zu at least",
                      (unsigned long long)bytes, sizeof *h);
    if ((uintptr_t)data % 8) return refuse(error, error_bytes, "image: not 8-byte aligned");
    if (memcmp(h->magic, DS4_IMAGE_MAGIC, 8) || h->format != DS4_IMAGE_FORMAT ||
        h->header_bytes != sizeof *h)
        return refuse(error, error_bytes, "image: got format %u, expected %u of this library",
                      h->format, DS4_IMAGE_FORMAT);
    if (h->abi != abi)
        return refuse(error, error_bytes,
                      "image: got ABI %016llx, expected %016llx; lower the contract again",
                      (unsigned long long)h->abi, (unsigned long long)abi);
    const struct {
        uint32_t count;
        size_t size;
        const void **view;
    } tables[] = {
        {h->n_allocations, sizeof(ds4_image_allocation), (const void **)&image->allocations},
        {h->n_weights, sizeof(ds4_image_weight), (const void **)&image->weight_records},
        {h->n_slots, sizeof(ds4_image_slot), (const void **)&image->slots},
        {h->n_ropes, sizeof(ds4_image_rope), (const void **)&image->ropes},
        {h->n_planes, sizeof(ds4_image_plane), (const void **)&image->planes},
        {h->n_ops, sizeof(ds4_image_op), (const void **)&image->ops},
        {h->n_sections, sizeof(ds4_image_section), (const void **)&image->sections},
    };
    uint64_t offset = sizeof *h;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (tables[i].count > MAX_RECORDS)
            return refuse(error, error_bytes, "image: table %zu: got %u records, expected at most %u",
                          i, tables[i].count, MAX_RECORDS);
        *tables[i].view = (const char *)data + offset;
        offset += (uint64_t)tables[i].count * tables[i].size;
    }
    if (offset != bytes || h->bytes != bytes)
        return refuse(error, error_bytes, "image: got %llu bytes, expected %llu by its tables",
                      (unsigned long long)bytes, (unsigned long long)offset);
    image->header = h;
    return check_header(h, error, error_bytes);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static int check_weight(const ds4_image_weight *w, const ds4_memory *memory, uint32_t n_memory,
                        const ds4_image *image, ds4_weight *out, const char **problem) {
    *problem = "allocation index";
    if (w->allocation >= image->header->n_allocations) return -1;
    uint32_t id = image->allocations[w->allocation].id;
    const ds4_memory *held = NULL;
    for (uint32_t i = 0; i < n_memory; i++)
        if (memory[i].id == id) held = memory + i;
    *problem = "its allocation is not attached";
    if (!held || !held->data) return -1;
    int whole = w->type == DS4_I32; /* a table, which no kernel reads */
    int64_t block = whole ? 1 : ds4_block_weights(w->type);
    int64_t block_bytes = whole ? 4 : ds4_block_bytes(w->type);
    *problem = "unknown ggml type";
    if (block <= 0 || block_bytes <= 0) return -1;
    *problem = "extents";
    if (w->rows < 1 || w->cols < 1 || w->rows > MAX_EXTENT || w->cols > MAX_EXTENT ||
        w->cols % block)
        return -1;
    *problem = "layout";
    if (whole ? w->layout != DS4_LAYOUT_RAW : !ds4_layout_exists(w->type, w->layout)) return -1;
    if (w->layout == DS4_LAYOUT_X8 && !ds4_pack_possible(w->type, w->rows, w->cols)) return -1;
    if (!whole && w->rows % ds4_row_granule(w->type, w->layout)) return -1;
    *problem = "bytes do not match its extents";
    if (w->experts < 1 || w->experts > DS4_MAX_EXPERTS) return -1;
    int64_t all = w->rows * w->experts;
    unsigned __int128 bytes =
        (unsigned __int128)(w->cols / block) * (uint64_t)block_bytes * (uint64_t)all;
    if (bytes >> 56) return -1; /* so the size of no layout overflows */
    if (!whole) bytes = (uint64_t)ds4_layout_bytes(w->type, w->layout, all, w->cols);
    if (bytes != w->bytes) return -1;
    *problem = "it ends beyond its allocation";
    if (w->bytes > held->bytes || w->offset > held->bytes - w->bytes) return -1;
    *out = (ds4_weight){(const char *)held->data + w->offset, w->type, w->layout, w->rows, w->cols, 0,
                        all};
    return 0;
}

static int check_slot(const ds4_image_slot *s, const ds4_image_header *h) {
    uint64_t room = s->space == DS4_SPACE_TOKENS ? h->token_bytes : h->row_bytes;
    if (s->space > DS4_SPACE_OUTPUTS || !s->width || s->width > MAX_EXTENT / 8) return -1;
    if (s->offset % 64 || s->bytes % 64 || s->bytes > room || s->offset > room - s->bytes) return -1;
    if (s->format == -1) return s->columns == 1 && s->bytes >= 4ull * s->width ? 0 : -1;
    size_t needed = s->format < 0 ? 0 : ds4_act_bytes(s->format, s->width);
    return needed && s->columns && s->columns <= DS4_MAX_USED && s->bytes >= needed * s->columns
               ? 0
               : -1;
}

static int check_rope(const ds4_image_rope *r, const checker *c) {
    if (!r->rope_dim || r->rope_dim % 2 || r->rope_dim > DS4_MAX_HEAD_DIM || r->style > 1) return -1;
    if (!(r->base > 1.0) || !isfinite(r->base) || !isfinite(r->freq_scale) ||
        !isfinite(r->attn_factor) || !isfinite(r->ext_factor) || !isfinite(r->beta_fast) ||
        !isfinite(r->beta_slow) || !isfinite(r->original_context))
        return -1;
    if (r->ext_factor > 0.0 && (!(r->freq_scale > 0.0) || !(r->beta_fast > 0.0) ||
                                !(r->beta_slow > 0.0) || !(r->original_context > 0.0)))
        return -1;
    for (int i = 0; i < 2; i++) {
        uint32_t factors = i ? r->long_factors : r->factors;
        if (factors != DS4_NONE && !is_vector(c, factors, r->rope_dim / 2)) return -1;
    }
    return r->truncate > 1 ? -1 : 0;
}

static int check_plane(const ds4_image_plane *p, uint32_t page_tokens) {
    if (p->window && (p->window > DS4_MAX_CONTEXT || p->kind == DS4_PLANE_TILES ||
                      p->kind == DS4_PLANE_STATE || p->ratio > 1))
        return -1;
    if (p->kind == DS4_PLANE_LATENT && (p->kv_heads != 1 || p->value_dim != p->dim)) return -1;
    if (!ds4_plane_attends(p)) return ds4_check_row_plane(p, page_tokens) ? 0 : -1;
    return p->kv_heads && p->kv_heads <= 4096 && p->dim && p->dim <= DS4_MAX_HEAD_DIM &&
                   p->value_dim && p->value_dim <= DS4_MAX_HEAD_DIM
               ? 0
               : -1;
}

/* ---- sections --------------------------------------------------------------------------------- */

static int check_sections(checker *c, int isa) {
    const ds4_image_header *h = c->image->header;
    uint32_t next = 0;
    for (uint32_t i = 0; i < h->n_sections; i++) {
        const ds4_image_section *s = c->image->sections + i;
        int shared = s->kind == DS4_SECTION_MATMUL || s->kind == DS4_SECTION_EXPERTS;
        uint32_t most = s->kind == DS4_SECTION_ROWS ? h->n_ops : shared ? DS4_MAX_PARTS : 1;
        if (s->kind >= DS4_SECTION_KINDS || s->space > DS4_SPACE_OUTPUTS || s->first_op != next ||
            !s->n_ops || s->n_ops > most || s->n_ops > h->n_ops - next)
            return refuse(c->error, c->error_bytes, "image: section %u: kind %u, ops %u+%u", i,
                          s->kind, s->first_op, s->n_ops);
        for (uint32_t j = 0; j < s->n_ops; j++, next++) {
            const ds4_image_op *op = c->image->ops + next;
            if (!ds4_check_op(c, s, op, isa))
                return refuse(c->error, c->error_bytes,
                              "image: op %u (kind %u) in section %u does not fit its slots, weights "
                              "or this CPU's kernels",
                              next, op->kind, i);
        }
    }
    if (next != h->n_ops)
        return refuse(c->error, c->error_bytes, "image: %u ops in sections, expected %u", next,
                      h->n_ops);
    if (!slot(c, h->logits_slot, DS4_SPACE_OUTPUTS, h->vocabulary, 0))
        return refuse(c->error, c->error_bytes, "image: slot %u does not hold the logits",
                      h->logits_slot);
    return 0;
}

int ds4_image_check(const ds4_image *image, const ds4_memory *memory, uint32_t n_memory, int isa,
                    ds4_weight *weights, char *error, size_t error_bytes) {
    const ds4_image_header *h = image->header;
    checker c = {image, weights, error, error_bytes};
    for (uint32_t i = 0; i < h->n_weights; i++) {
        const char *problem;
        const ds4_image_weight *w = image->weight_records + i;
        if (check_weight(w, memory, n_memory, image, weights + i, &problem)) {
            uint32_t id = w->allocation < h->n_allocations ? image->allocations[w->allocation].id
                                                           : w->allocation;
            return refuse(error, error_bytes,
                          "image: weight %u (ggml type %u, %lld x %lld at byte %llu of allocation "
                          "%u): %s",
                          i, w->type, (long long)w->rows, (long long)w->cols,
                          (unsigned long long)w->offset, id, problem);
        }
    }
    for (uint32_t i = 0; i < h->n_slots; i++)
        if (check_slot(image->slots + i, h))
            return refuse(error, error_bytes, "image: slot %u out of bounds", i);
    for (uint32_t i = 0; i < h->n_ropes; i++)
        if (check_rope(image->ropes + i, &c))
            return refuse(error, error_bytes, "image: rope %u: parameters out of range", i);
    for (uint32_t i = 0; i < h->n_planes; i++)
        if (check_plane(image->planes + i, h->page_tokens))
            return refuse(error, error_bytes, "image: cache plane %u: extents out of range", i);
    return check_sections(&c, isa);
}
