/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The client library of Rushes, engine/shm, as a C plug-in sees it.
 *
 * One struct rushes_client is one session with the daemon; it belongs to one
 * thread. No call blocks on a dead or hung peer for longer than said here,
 * none writes to standard output, none exits or raises a signal.
 *
 * After fork(2) the child's copy of a client is dead: every read is PLAIN, and
 * it touches nothing shared. The session lives as long as either process keeps
 * its descriptors, which are all close-on-exec.
 */
#ifndef RUSHES_CLIENT_H
#define RUSHES_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

struct rushes_client;
struct rushes_file;
struct rushes_facts;

/* Doors, as in core/format. */
#define RUSHES_DOOR_SMB 1
#define RUSHES_DOOR_FUSE 2
#define RUSHES_DOOR_LOCAL 3

/*
 * Result of a read that the caller must do on its own descriptor: the daemon
 * does not serve this file, or is gone. Never a valid errno.
 */
#define RUSHES_PLAIN (-65536)

/* Slots that one lease can span; as REPLY_SLOTS_MAX in core/format. */
#define RUSHES_LEASE_IOV_MAX 16

/* Pinned bytes of the cache; see rushes_read_begin. */
struct rushes_lease {
	uint64_t id;
	size_t length;		/* bytes in all; short only at end of file */
	int iov_count;
	struct iovec iov[RUSHES_LEASE_IOV_MAX];
};

/* One finished asynchronous read, write or sync. */
struct rushes_completion {
	void *private_data;	/* as given to rushes_read_send etc. */
	ssize_t result;		/* bytes copied: of a read short only at end of
				 * file, of a write all, of a sync 0; -errno; or
				 * RUSHES_PLAIN */
};

/* Facts of a file that its file system does not have yet. */
struct rushes_fact {
	uint64_t size;
	int64_t changed_ns;	/* since 1970 */
	uint64_t generation;	/* as of rushes_generation; 0: not known */
};

/*
 * Connect to the daemon, waiting at most `patience_ms`. The caller must be
 * uid 0. Returns NULL and sets *reason, a static string and never NULL, when
 * there is no daemon, it refuses, or it speaks another version; errno is
 * ETIMEDOUT when there is one that has not answered, EACCES when it refuses.
 */
struct rushes_client *rushes_connect(const char *socket_path, uint32_t door,
				     const char *share, const char *user,
				     const char *address,
				     uint32_t patience_ms,
				     const char **reason);

/*
 * End the session. Forgets outstanding requests and frees the session's files:
 * the caller must not use them again.
 */
void rushes_disconnect(struct rushes_client *client);

/*
 * False once the daemon is known to be gone; then every request returns PLAIN,
 * but for those of files that the next daemon has to answer: see
 * rushes_is_lost.
 */
bool rushes_alive(const struct rushes_client *client);

/*
 * Another number each second while the daemon lives. A daemon whose number has
 * stood still for some seconds will not answer outstanding requests.
 */
uint32_t rushes_heartbeat(const struct rushes_client *client);

/*
 * Two descriptors to watch for reading as long as the client is alive, also
 * while no request is outstanding: rushes_poll gives back replies to cancelled
 * ones. When either is readable, call rushes_poll until it returns less than
 * asked for. [0] is the doorbell, [1] the session socket, readable only when
 * the daemon is gone: it stays so, stop watching then.
 */
void rushes_event_fds(const struct rushes_client *client, int fds[2]);

/*
 * Name an open file to the daemon. `fd` stays the caller's; its path is below
 * the share's root; writes go on the account of `uid` and `gid`. Does not
 * wait. NULL when the daemon is gone or out of memory: use plain I/O.
 */
struct rushes_file *rushes_open(struct rushes_client *client, int fd,
				const char *path, uid_t uid, gid_t gid);

/* Forget a file. Its outstanding requests complete or were cancelled before. */
void rushes_close(struct rushes_file *file);

/*
 * Start a read into `buffer`, which must stay valid until rushes_poll returns
 * its completion or the caller cancels the read. Returns a non-zero ticket, or
 * 0 when it was not taken, as the daemon is gone or the ring full: do plain
 * I/O.
 */
uint64_t rushes_read_send(struct rushes_file *file, void *buffer,
			  size_t length, uint64_t offset, void *private_data);

/*
 * The buffer is going away: forget the read, write or sync. It gets no
 * completion. A write may happen all the same, as a whole or not at all.
 */
void rushes_request_cancel(struct rushes_client *client, uint64_t ticket);

/*
 * Collect finished requests; bytes read are already in their buffers. Never
 * waits. When the daemon is gone every outstanding request finishes PLAIN, but
 * for those of files that the next daemon has to answer: see rushes_is_lost.
 */
int rushes_poll(struct rushes_client *client,
		struct rushes_completion *completions, int completion_count);

/*
 * Read and wait. Bytes read, short only at end of file; -errno; or
 * RUSHES_PLAIN.
 */
ssize_t rushes_read(struct rushes_file *file, void *buffer, size_t length,
		    uint64_t offset);

/*
 * Pin bytes of the cache and wait until they are there, to send them without a
 * copy. Cuts `length` to the span of one lease. 0, -errno, RUSHES_PLAIN.
 */
int rushes_read_begin(struct rushes_file *file, size_t length,
		      uint64_t offset, struct rushes_lease *lease);
void rushes_read_end(struct rushes_file *file, struct rushes_lease *lease);

/* Does the daemon take writes in this session? If not, all are plain. */
bool rushes_takes_writes(const struct rushes_client *client);

/*
 * Start a write from `buffer`, which must stay valid and unchanged until
 * rushes_poll returns its completion or the caller cancels it. The daemon
 * acknowledges it as a whole or not at all. RUSHES_PLAIN as its result, or 0
 * here: write it on your own descriptor, then call rushes_changed.
 */
uint64_t rushes_write_send(struct rushes_file *file, const void *buffer,
			   size_t length, uint64_t offset, void *private_data);

/* Write and wait. Returns the result that its completion would have. */
ssize_t rushes_write(struct rushes_file *file, const void *buffer,
		     size_t length, uint64_t offset);

/*
 * Start a flush of all acknowledged bytes of a file. 0 here, or RUSHES_PLAIN as
 * its result: the file has all bytes, sync your own descriptor.
 */
uint64_t rushes_sync_send(struct rushes_file *file, void *private_data);

/*
 * The caller is about to change a file on its own descriptor by something else
 * than a write, such as truncate, copy on the server, setting its times: wait
 * until the file has all acknowledged bytes. The daemon grants no client more
 * of it until rushes_changed. Returns 0; RUSHES_PLAIN when the daemon is gone;
 * -errno, and holds nothing, when it cannot write acknowledged bytes.
 */
ssize_t rushes_hold(struct rushes_client *client, dev_t device, ino_t inode);

/*
 * The caller is about to set a file's time of change, since 1970, on its own
 * descriptor: wait until no daemon sets another, but for writes that come
 * after this. False: the daemon is gone.
 */
bool rushes_timed(struct rushes_client *client, dev_t device, ino_t inode,
		  int64_t changed_ns);

/*
 * The facts of files that all daemons at this socket, one after another, have
 * set: also with no session, and with no daemon. The caller must be uid 0.
 * NULL: none of them has taken writes yet.
 */
struct rushes_facts *rushes_facts_open(const char *socket_path);
void rushes_facts_close(struct rushes_facts *facts);

/*
 * The caller changes a file on its own descriptor from now on: no daemon starts
 * to serve before rushes_plain_end, since it would not know of the change. Call
 * this before each change, and rushes_plain_end once, when none is under way
 * any more. False: a daemon is just starting, try again soon.
 */
bool rushes_plain_begin(const struct rushes_facts *facts);
void rushes_plain_end(const struct rushes_facts *facts);

/* Is there a file with a fact at all? Reads the whole table, 4 MiB. */
bool rushes_has_facts(const struct rushes_facts *facts);

/*
 * Length and time of change of a file of which the file system does not have
 * all bytes yet. False, also for NULL: it has them, and its answer is right.
 * Costs no system call.
 */
bool rushes_fact_of(const struct rushes_facts *facts, dev_t device,
		    ino_t inode, struct rushes_fact *fact);

/*
 * Tells a file from those that had its inode number before it: a dead daemon no
 * longer holds open the files that it has bytes of, so their numbers may be
 * reused. 0: cannot be known. The descriptor may be O_PATH.
 */
uint64_t rushes_generation(int fd);

/*
 * True: a daemon has reserved blocks behind the end of the file, which belong
 * to no client and which it frees again; `before`: bytes that the file took on
 * its disk before.
 * As rushes_fact_of otherwise.
 */
bool rushes_has_reserve(const struct rushes_facts *facts, dev_t device,
			ino_t inode, uint64_t *before);

/*
 * True: the kernel may have been unable to write some of the file's bytes, and
 * may drop them; the daemon has a copy as long as it lives. Hold the file
 * before you read it plainly. As rushes_fact_of otherwise.
 */
bool rushes_is_loose(const struct rushes_facts *facts, dev_t device,
		     ino_t inode);

/* The daemon is hung: take it for dead. */
void rushes_lose(struct rushes_client *client);

/*
 * The daemon is gone, and has acknowledged bytes that files may not have yet.
 * Reads, writes and syncs of a file with a rushes_fact_of then wait for the
 * next daemon, those under way and new ones; calls that wait return
 * RUSHES_PLAIN, and the caller must neither read nor write such a file plainly.
 * Everything else is as without a daemon.
 */
bool rushes_is_lost(const struct rushes_client *client);

/*
 * Go on with another daemon, which gets patience_ms to answer. The caller must
 * be uid 0. False: there is none yet, errno as of rushes_connect. If true,
 * rushes_event_fds have changed: watch the new ones, and call rushes_poll.
 */
bool rushes_reconnect(struct rushes_client *client, uint32_t patience_ms);

/*
 * Without another daemon: has another program, such as rushes recover, written
 * all acknowledged bytes? Then call rushes_give_up: waiting requests end
 * RUSHES_PLAIN.
 */
bool rushes_is_recovered(const struct rushes_client *client);
void rushes_give_up(struct rushes_client *client);

/*
 * Tell the daemon that bytes of a file were changed on its own descriptor, and
 * wait until no reader will see older ones: call it after the change, before
 * you answer the application. length UINT64_MAX: to the end of the file.
 * Without a daemon there is nothing to do and it returns at once.
 */
void rushes_changed(struct rushes_client *client, dev_t device, ino_t inode,
		    uint64_t offset, uint64_t length);

/*
 * As rushes_changed to the end of the file, where nothing was written: only the
 * length or the blocks from offset on have changed, and none of these bytes
 * waits in the kernel's cache. Not for a truncate within a page: that writes
 * zeros.
 */
void rushes_resized(struct rushes_client *client, dev_t device, ino_t inode,
		    uint64_t offset);

/*
 * Are some of a file's bytes another file's too, or compressed, or in its
 * inode, so that to write them takes new blocks? Asks the file system, and no
 * daemon.
 */
bool rushes_is_shared(int fd);

/* As rushes_changed for a file that lost a name. */
void rushes_gone(struct rushes_client *client, dev_t device, ino_t inode);

#ifdef __cplusplus
}
#endif
#endif
