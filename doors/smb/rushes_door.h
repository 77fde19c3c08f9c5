/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Shared by the files of this module: a session with the daemon for each tree
 * connect (rushes_session.c), the state of each open file (rushes_fsp.c), the
 * work around changes (rushes_write.c), and Samba's entries (vfs_rushes.c,
 * vfs_rushes_read.c, vfs_rushes_write.c).
 *
 * Include after Samba's "includes.h" and "smbd/smbd.h".
 */
#ifndef RUSHES_DOOR_H
#define RUSHES_DOOR_H

#include "rushes_client.h"

extern int vfs_rushes_debug_level;

#undef DBGC_CLASS
#define DBGC_CLASS vfs_rushes_debug_level

#define RUSHES_NS_PER_S UINT64_C(1000000000)

/*
 * Without a daemon the module looks for one once in this time. It offers a file
 * that the daemon does not serve to it again after this time, then after twice
 * as long each time.
 */
#define RUSHES_RETRY_S 1
#define RUSHES_RETRY_NS (RUSHES_RETRY_S * RUSHES_NS_PER_S)
#define RUSHES_OFFER_NS_MAX (64 * RUSHES_NS_PER_S)

/*
 * A daemon gets so long to accept a session, or AWAITED if requests wait for
 * it. If it does not, the module spends at most one part in RETRY_SHARE of its
 * time on further attempts, or makes one attempt in RETRY_S_MAX. Before a file
 * is changed without its knowledge it gets SILENT_MS: a daemon that stood still
 * for so long notices that itself, and reads everything again (STALL in
 * engine/daemon).
 */
#define RUSHES_CONNECT_MS 50
#define RUSHES_AWAITED_MS 500
#define RUSHES_RETRY_SHARE 100
#define RUSHES_RETRY_S_MAX 60
#define RUSHES_SILENT_MS 5000

/*
 * A daemon that does not answer a request for so long and has no heartbeat is
 * hung; one that has a heartbeat and does not answer for LOST has lost the
 * request. Like HUNG_PATIENCE and LOST_PATIENCE in engine/shm for calls that wait.
 * Clients give up at 20 to 60 seconds.
 */
#define RUSHES_HUNG_S 30
#define RUSHES_LOST_S 120
#define RUSHES_GUARD_S 5

/*
 * A daemon that dies may have acknowledged bytes that files lack. The module
 * looks for another this often. If none has come in RECOVER_S, each session
 * starts "rushes recover"; one of these processes writes the bytes. It may
 * fail, because of a disk, or of a daemon that starts and then dies: if bytes
 * are left after RECOVER_AGAIN_S, then after twice as long and so on, the
 * session starts it again. A call that cannot wait in the background fails
 * after PATIENCE_S.
 */
#define RUSHES_LOOK_MS 50
#define RUSHES_RECOVER_S 5
#define RUSHES_RECOVER_AGAIN_S 30
#define RUSHES_RECOVER_AGAIN_S_MAX 480
#define RUSHES_PATIENCE_S 90

/*
 * The daemon writes again the bytes that the kernel could not write, once a
 * second while that fails; a plain read of the file waits so long for that.
 */
#define RUSHES_AGAIN_MS 3000

/* Freed memory that malloc may keep; see rushes_keep_buffers. */
#define RUSHES_KEEP_BYTES (32 * 1024 * 1024)

/*
 * If a client takes no bytes for so long, the module copies them and unpins the
 * slots.
 */
#define RUSHES_SEND_STALL_MS 1000

struct rushes_fsp;
struct rushes_session;

/* Result of a request whose file or share is closed meanwhile; no errno. */
#define RUSHES_ABANDONED (RUSHES_PLAIN - 1)

/*
 * An asynchronous read, write or sync that the daemon has not answered. Part of
 * the caller's own state; in its session's list exactly as long as the daemon
 * may answer.
 */
struct rushes_request {
	struct rushes_request *prev, *next;
	struct rushes_session *session;
	struct rushes_fsp *file;
	uint64_t ticket;
	struct timespec start_time;

	/*
	 * Called once, with bytes read or written, 0 of a sync, -errno,
	 * RUSHES_PLAIN or RUSHES_ABANDONED, when the request is not in the list
	 * any more. Must run no foreign code.
	 */
	void (*done_fn)(struct rushes_request *request, ssize_t result);

	/* Called from the event loop after rushes_request_defer: may wait */
	void (*plain_fn)(struct rushes_request *request);
};

/*
 * One tree connect.
 */
struct rushes_session {
	struct tevent_context *ev;
	const char *socket_path;
	const char *share;
	const char *user;
	const char *address;

	/* NULL: no daemon, plain I/O */
	struct rushes_client *client;
	struct tevent_fd *fdes[2];

	/* The number of the client; a file with another number is void */
	uint64_t number;

	/* Oldest first */
	struct rushes_request *requests;

	/* The timer that watches them; see rushes_session_guard */
	struct tevent_timer *guard;

	/* The daemon's, at the guard's last look */
	uint32_t heartbeat;

	/* A daemon runs, and did not accept the session in time */
	bool is_silent;

	/*
	 * Before that time it is not waited for longer than usual, as long as
	 * this is its socket; the same clock
	 */
	uint64_t patient_ns;
	struct stat deaf;

	/* The socket file at the last attempt to connect */
	struct stat asked;

	/*
	 * The facts that daemons have published about files beyond what file
	 * systems say, with a daemon or without one; NULL: none
	 */
	struct rushes_facts *facts;

	/*
	 * Whether any file had a fact at the last look; no look before facts_look_ns
	 */
	bool has_facts;
	uint64_t facts_look_ns;

	/* A daemon runs, and refuses this session */
	bool is_refused;

	/*
	 * Changes on smbd's own descriptors, beside which no daemon may start
	 */
	uint32_t plain_count;

	/* Do not look for a daemon before; CLOCK_MONOTONIC_COARSE */
	uint64_t retry_ns;

	/* The socket file that refused last; see rushes_socket_is_new */
	struct stat refused;

	/* The absence is in the log already */
	bool absence_logged;

	/* When a daemon that may have left bytes was lost; 0: none */
	uint64_t lost_ns;
	struct tevent_timer *look;

	/* Do not look for another before */
	uint64_t look_ns;

	/*
	 * Without a client: when the search for a daemon began; 0: there is
	 * none
	 */
	uint64_t missed_ns;

	/*
	 * The command that writes the bytes left, if no daemon comes: a shell's
	 * line
	 */
	const char *recover_command;
	uint64_t recover_ns;
	/* Earliest time of its next start; 0: it was not started */
	uint64_t recover_again_ns;
	uint32_t recover_wait_s;

	/* A daemon without a heartbeat for so long counts as dead */
	uint64_t hung_ns;
};

/* CLOCK_MONOTONIC_COARSE: read in a few ns, good to some milliseconds. */
uint64_t rushes_now_ns(void);

/* Looks for a daemon now. The session exists also without one. */
void rushes_session_connect(struct rushes_session *session);

/* Whether there is a live daemon, as far as the session knows. */
bool rushes_session_has_daemon(const struct rushes_session *session);

/*
 * A file lacks bytes that some daemon has acknowledged, and there is none:
 * looks for one now, and starts the command that writes them if none comes.
 */
void rushes_session_seek(struct rushes_session *session);
bool rushes_session_is_lost(const struct rushes_session *session);

/*
 * May a request have to wait for a missing daemon? Yes while there are bytes
 * that a dead one had.
 */
bool rushes_session_may_wait(struct rushes_session *session);

/* For good: requests under way fail, since their buffers go away. */
void rushes_session_disconnect(struct rushes_session *session);

/*
 * Is there a daemon that the session does not know yet? Another smbd may have
 * found it already, and written through it: called before every look at a file.
 * Costs a comparison while there is a session, a stat of the socket while there
 * is none.
 */
void rushes_session_refresh(struct rushes_session *session);

/*
 * The daemon to read from, or NULL. It may be lost: then requests on a file
 * with a fact wait for the next one.
 */
struct rushes_client *rushes_session_for_read(struct rushes_session *session);

/* The daemon that must know about a change, or NULL. */
struct rushes_client *rushes_session_for_write(struct rushes_session *session);

/*
 * No other daemon begins to serve now (rushes_plain_begin): is there no daemon
 * for this session, or only one that does not react? Does not wait for a slow
 * one. False: there is one, or may be.
 */
bool rushes_session_is_alone(struct rushes_session *session);

/*
 * Call it after every call of the client library that may have waited or
 * failed: that call may have read the doorbell of asynchronous requests, and
 * may have found the daemon dead. session->client may be NULL afterwards.
 */
void rushes_session_after_wait(struct rushes_session *session);

/*
 * Start a read of a named file; session, file and done_fn are set. False: not
 * taken, read the file itself. `data` stays valid until done_fn or
 * rushes_request_forget.
 */
bool rushes_read_start(struct rushes_request *request, void *data, size_t n,
		       off_t offset);

/* The same for a write, and for stable storage. */
bool rushes_write_start(struct rushes_request *request, const void *data,
			size_t n, off_t offset);
bool rushes_sync_start(struct rushes_request *request);

/*
 * For done_fn, which must not wait: has plain_fn called soon, unless the
 * request is freed before. The request is a talloc chunk of its own, or the
 * head of one. False: out of memory.
 */
bool rushes_request_defer(struct rushes_request *request,
			  struct tevent_context *ev);

/* Its buffer is going away: done_fn will not be called. */
void rushes_request_forget(struct rushes_request *request);

/* A request under way of this file, or NULL. */
struct rushes_request *rushes_request_of(const struct rushes_fsp *file);

/*
 * An open file: the fsp's extension.
 */
struct rushes_fsp {
	/* Among the sources of copies; see rushes_copy_source */
	struct rushes_fsp *prev, *next;
	bool is_copy_source;

	/* The daemon knows that the file shares blocks with another one */
	bool is_shared_told;

	struct rushes_session *session;
	struct files_struct *fsp;

	/* Its name to the daemon in session `number`; NULL: it has none */
	struct rushes_file *file;
	uint64_t number;

	/* Plain I/O until then: the daemon did not serve this file */
	uint64_t offer_ns;

	/* The daemon has answered a read of it since it got the name */
	bool was_served;
	uint64_t offer_wait_ns;

	/* Of the descriptor, even if modules above change st_ex_ino */
	dev_t device;
	ino_t inode;

	/* Those of its session's changes that are of this file */
	uint32_t plain_count;

	/* Changed by smbd's own descriptor, and not synced since */
	bool owes_sync;

	/* It has bytes of its own on a disk */
	bool is_regular;

	/* pwrite writes at the end, at any offset */
	bool is_append;

	/* pwrite ends on stable storage */
	bool is_sync;

	/* The daemon may get its path */
	bool is_servable;

	/* smbd holds a kernel lease on its descriptor */
	bool is_leased;
};

/* NULL on IPC$, printers, and connections within smbd. */
struct rushes_session *rushes_session_of(struct vfs_handle_struct *handle);

/* NULL: not a file with data of its own, or out of memory. */
struct rushes_fsp *rushes_fsp_get(struct vfs_handle_struct *handle,
				  struct files_struct *fsp);

/*
 * The file with a name to the daemon, for reads through it; NULL: read the file
 * itself. Names it to the daemon if that has not been done.
 */
struct rushes_fsp *rushes_fsp_for_read(struct vfs_handle_struct *handle,
				       struct files_struct *fsp);

/* Take a file's name back from the daemon. */
void rushes_fsp_unname(struct rushes_fsp *file);

/* The daemon answered "read it yourself". */
void rushes_fsp_declined(struct rushes_fsp *file);

/*
 * Does this answer mean that the module has to read the file itself? The client
 * gets a disk's errors of its medium. Other errors are about the daemon (a
 * handle, a limit): a read on smbd's own descriptor shows the truth.
 */
bool rushes_is_plain(ssize_t result);

/*
 * Reporting changes to the daemon. All of these are called after the change,
 * keep errno, and are called for failed changes too, since these may have
 * written part of the bytes.
 *
 * A length says that all of these bytes were written, so that the file is at
 * least as long and has blocks there. UINT64_MAX: unknown, from there on.
 */
static inline uint64_t rushes_changed_length(size_t n, ssize_t written)
{
	return (written >= 0 && (size_t)written == n) ? n : UINT64_MAX;
}

void rushes_changed_inode(struct rushes_session *session,
			  dev_t device, ino_t inode,
			  uint64_t offset, uint64_t length);
void rushes_changed_fsp(struct vfs_handle_struct *handle,
			struct files_struct *fsp,
			uint64_t offset, uint64_t length);

/* A multiple of the kernel's pages, on any machine. Units: bytes. */
#define RUSHES_PAGE 65536

/* Its length or blocks alone, from there on: no byte waits for a disk. */
void rushes_resized_fsp(struct vfs_handle_struct *handle,
			struct files_struct *fsp,
			uint64_t offset);

/*
 * The request of a change is freed, since the client is gone. A thread of
 * vfs_default may have made the change, or be making it; the daemon sees its
 * later writes as a foreign change. Does not look for a daemon, since it runs
 * in a destructor.
 */
void rushes_changed_orphan(struct vfs_handle_struct *handle,
			   struct files_struct *fsp,
			   uint64_t offset, uint64_t length);

/*
 * Does the loss of a name matter to the daemon? Then st says whose name it is.
 */
bool rushes_name_matters(struct vfs_handle_struct *handle,
			 struct files_struct *dirfsp,
			 const struct smb_filename *smb_fname,
			 SMB_STRUCT_STAT *st);
void rushes_gone_inode(struct vfs_handle_struct *handle,
		       const SMB_STRUCT_STAT *st);

/*
 * Writing through the daemon: see rushes_write.c.
 *
 * The file for writes through the daemon; NULL: write the file itself.
 */
struct rushes_fsp *rushes_fsp_for_write(struct vfs_handle_struct *handle,
					struct files_struct *fsp);

/* Like rushes_is_plain; the client also gets the error of a full disk. */
bool rushes_write_is_plain(ssize_t result);

/* Does the daemon have bytes of it that the file system lacks? */
bool rushes_has_fact(struct rushes_session *session, dev_t device,
		     ino_t inode);

/*
 * Call it before a change of a file on its own descriptor: waits until the file
 * has all acknowledged bytes. rushes_changed_* ends this. False, with errno
 * set: it never will, and the file must stay as it is. Until then no other
 * daemon begins to serve either, since it would not know of the change.
 */
bool rushes_hold_fsp(struct vfs_handle_struct *handle,
		     struct files_struct *fsp);

/* One change of a file after rushes_hold_fsp has ended. */
void rushes_plain_ended(struct rushes_fsp *file);

/*
 * Call it before a read of a file on its own descriptor: waits until the file
 * has all acknowledged bytes. Costs no system call if it has.
 */
bool rushes_settle_inode(struct rushes_session *session, dev_t device,
			 ino_t inode);
bool rushes_settle_fsp(struct vfs_handle_struct *handle,
		       struct files_struct *fsp);

/*
 * Call it before a file's mtime is set: a daemon that has bytes of it will then
 * not set another. Does not wait for the bytes. False, with errno set: no
 * daemon can be told.
 */
bool rushes_time_inode(struct rushes_session *session, dev_t device,
		       ino_t inode, struct timespec changed);

/*
 * Corrects the result of stat for this name below this folder, or, without a
 * name, for this descriptor.
 */
void rushes_fix_stat(struct vfs_handle_struct *handle, SMB_STRUCT_STAT *st,
		     int fd, const char *name);

/*
 * A copy on the server may read from the file; it is closed; and: a copy is
 * about to begin. It may go from one share to another, so all sessions' sources
 * count.
 */
void rushes_copy_source(struct vfs_handle_struct *handle,
			struct files_struct *fsp);
void rushes_copy_source_closed(struct rushes_fsp *file);
bool rushes_settle_copy_sources(void);
void rushes_copied(void);

#endif /* RUSHES_DOOR_H */
