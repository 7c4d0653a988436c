/*
 * What a peer's hardware would do to registered memory, on one device: a pair of reliable
 * connections, each the other's peer.  Of its own, given a device's name, or on the context and
 * protection domain of other code.
 *
 *	   local (address, lkey)  ── write, read, send ──>  remote (address, rkey)
 *	                a queue pair  ═════════════════  a queue pair
 *
 * Functions return 0, -errno, or a positive ibv_wc_status.  Waiting sleeps and ends.  A pair is
 * used by one thread at a time; after an error it is good for nothing but rc_pair_close().
 */
#ifndef RC_H
#define RC_H

#include <infiniband/verbs.h>
#include <stdint.h>

struct rc_pair;

enum rc_what {
	RC_WRITE,
	RC_READ,
	RC_SEND,
};

/* A transfer, piece by piece: nbytes of them, each at a multiple of stride. */
struct rc_job {
	uint64_t local, remote, nbytes, stride, piece;
	uint32_t lkey, rkey, timeout_ms;
};

int rc_open(const char *name, struct ibv_context **context, struct ibv_pd **pd);
int rc_close(struct ibv_context *context, struct ibv_pd *pd);
int rc_alloc_pd(struct ibv_context *context, struct ibv_pd **pd);
int rc_dealloc_pd(struct ibv_pd *pd);

int rc_reg(struct ibv_pd *pd, uint64_t address, uint64_t nbytes, int access, struct ibv_mr **mr,
	   uint32_t *lkey, uint32_t *rkey);
int rc_dereg(struct ibv_mr *mr);
/* The bare calls that pd.register() and close() are measured against. */
int rc_reg_dereg(struct ibv_pd *pd, uint64_t address, uint64_t nbytes, int access, int times);
/* Are reliable connections served from memory that is not pinned?  1, 0 or -errno. */
int rc_on_demand(struct ibv_context *context);
/* The command and event descriptors, which no child may share. */
void rc_fds(struct ibv_context *context, int fds[2]);

int rc_pair_open(struct ibv_context *context, struct ibv_pd *pd, struct rc_pair **result);
int rc_pair_close(struct rc_pair *pair);
/* Moves a piece at every multiple of the stride; for RC_SEND rkey is the receiver's lkey. */
int rc_move(struct rc_pair *pair, enum rc_what what, const struct rc_job *job);

/* Writes the pieces that rc_move() moves. */
void rc_fill(volatile unsigned char *to, const struct rc_job *job, uint32_t seed);
/* How many bytes of the pieces differ from rc_fill()'s. */
uint64_t rc_wrong(const volatile unsigned char *in, const struct rc_job *job, uint32_t seed);

#endif
