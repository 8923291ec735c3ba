/* QEMU plugin: counts the instructions that an emulated program executes between two calls of getppid.
 *
 * The program marks with that call, which does nothing else, where a count begins and where it ends; the
 * plugin prints every count on a line. Declares what it uses of QEMU's plugin interface, version 1, which
 * comes without its header in packages of the emulator.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORTED __attribute__((visibility("default")))
enum { MARK = 173 /* getppid, 64-bit ARM */ };

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *, uint64_t);
void qemu_plugin_register_vcpu_syscall_cb(plugin_id, void (*)(plugin_id, unsigned, int64_t, uint64_t,
                                                              uint64_t, uint64_t, uint64_t, uint64_t,
                                                              uint64_t, uint64_t, uint64_t));

EXPORTED int qemu_plugin_version = 1;
static uint64_t executed, begun;
static int counting;

static void translated(plugin_id id, struct qemu_plugin_tb *block) {
    (void)id; /* operation 0: add */
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &executed, qemu_plugin_tb_n_insns(block));
}

static void called(plugin_id id, unsigned cpu, int64_t number, uint64_t a, uint64_t b, uint64_t c,
                   uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
    (void)id, (void)cpu, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
    if (number != MARK) return;
    if (counting) fprintf(stderr, "%" PRIu64 "\n", executed - begun);
    counting = !counting;
    begun = executed;
}

EXPORTED int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, called);
    return 0;
}
