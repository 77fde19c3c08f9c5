/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * What the files of this module share: a session with the daemon for each tree
 * connect (rushes_session.c), what is known about each open file
 * (rushes_fsp.c), and Samba's hooks (vfs_rushes.c).
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
 * Without a daemon we look for one once in this time. A file that the daemon
 * does not serve is offered to it again after it, and then after twice as long
 * each time.
 */
#define RUSHES_RETRY_S 1
#define RUSHES_RETRY_NS (RUSHES_RETRY_S * RUSHES_NS_PER_S)
#define RUSHES_OFFER_NS_MAX (64 * RUSHES_NS_PER_S)

/*
 * A daemon gets so long to let us in, one that requests wait for AWAITED. If it
 * does not, no more than one part in RETRY_SHARE of our time goes into asking
 * again, or one attempt in RETRY_S_MAX.
 * Before something is changed behind its back it gets SILENT_MS: what is deaf
 * for so long knows of it, and reads all anew (STALL in engine/daemon).
 */
#define RUSHES_CONNECT_MS 50
#define RUSHES_AWAITED_MS 500
#define RUSHES_RETRY_SHARE 100
#define RUSHES_RETRY_S_MAX 60
#define RUSHES_SILENT_MS 5000

/*
 * A daemon that leaves a read alone for so long and whose heart does not beat
 * is hung; one that lives and leaves it alone for LOST has lost it. As
 * HUNG_PATIENCE and LOST_PATIENCE in engine/shm for calls that wait. Clients
 * give up at 20 to 60 seconds.
 */
#define RUSHES_HUNG_S 30
#define RUSHES_LOST_S 120
#define RUSHES_GUARD_S 5

/*
 * A daemon that dies may have acknowledged what files do not have yet. We look
 * for another this often; if none has come in RECOVER_S, "rushes recover" is
 * started, as one of many who do so: one of them writes what was left. It may
 * be refused, by a disk or by a daemon that starts and then dies: what is still
 * left after RECOVER_AGAIN_S, then after twice as long and so on, has it
 * started again. A call that cannot wait in the background fails after
 * PATIENCE_S.
 */
#define RUSHES_LOOK_MS 50
#define RUSHES_RECOVER_S 5
#define RUSHES_RECOVER_AGAIN_S 30
#define RUSHES_RECOVER_AGAIN_S_MAX 480
#define RUSHES_PATIENCE_S 90

/*
 * What the kernel could not write the daemon writes again, once a second while
 * that fails; who reads the file plainly waits for that so long.
 */
#define RUSHES_AGAIN_MS 3000

/* What malloc may keep of freed memory; see rushes_keep_buffers. */
#define RUSHES_KEEP_BYTES (32 * 1024 * 1024)

/* A client who takes nothing for so long has its bytes copied and unpinned. */
#define RUSHES_SEND_STALL_MS 1000

struct rushes_fsp;
struct rushes_session;

/* Result of a read whose file or share is closed under it; no errno. */
#define RUSHES_ABANDONED (RUSHES_PLAIN - 1)

/*
 * An asynchronous read that the daemon has not answered. Part of the caller's
 * request; in its session's list exactly as long as the daemon may answer.
 */
struct rushes_read {
	struct rushes_read *prev, *next;
	struct rushes_session *session;
	struct rushes_fsp *file;
	uint64_t ticket;
	struct timespec start_time;

	/*
	 * Called once, with bytes read, -errno, RUSHES_PLAIN or
	 * RUSHES_ABANDONED; the read is not in the list any more. May run no
	 * foreign code.
	 */
	void (*done_fn)(struct rushes_read *read, ssize_t result);

	/* Called from the event loop after rushes_read_defer: may wait */
	void (*plain_fn)(struct rushes_read *read);
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

	/* Of the client; a file with another number is void */
	uint64_t number;

	/* Oldest first */
	struct rushes_read *reads;

	/* Looks after them; see rushes_session_guard */
	struct tevent_timer *guard;

	/* The daemon's, when the guard last looked */
	uint32_t heartbeat;

	/* There is one, and it did not let us in in time */
	bool is_silent;

	/*
	 * Not to be waited for longer than usual before, as long as this is its
	 * socket; the same clock
	 */
	uint64_t patient_ns;
	struct stat deaf;

	/* The socket file when a daemon was last asked to let us in */
	struct stat asked;

	/*
	 * What is known of files beyond what file systems say, with a daemon or
	 * without one; NULL: nothing
	 */
	struct rushes_facts *facts;

	/* Of any file, when they were last looked through; not before look_ns */
	bool has_facts;
	uint64_t facts_look_ns;

	/* There is a daemon, and it does not want us */
	bool is_refused;

	/* Changes on our own descriptors that no daemon may start beside */
	uint32_t plain_count;

	/* Do not look for a daemon before; CLOCK_MONOTONIC_COARSE */
	uint64_t retry_ns;

	/* The socket file that last turned us away; see rushes_socket_is_new */
	struct stat refused;

	/* The absence is in the log already */
	bool absence_logged;

	/* Since when a daemon that may have left something is gone; 0: none */
	uint64_t lost_ns;
	struct tevent_timer *look;

	/* Do not look for another before */
	uint64_t look_ns;

	/* Without a client: since when a daemon is sought; 0: it is not */
	uint64_t missed_ns;

	/* Who writes what was left, if no daemon comes: a shell's line */
	const char *recover_command;
	uint64_t recover_ns;
	/* It is not started again before; 0: it was not started */
	uint64_t recover_again_ns;
	uint32_t recover_wait_s;

	/* Without a heartbeat for so long a daemon is taken for dead */
	uint64_t hung_ns;
};

/* CLOCK_MONOTONIC_COARSE: read in a few ns, good to some milliseconds. */
uint64_t rushes_now_ns(void);

/* Look for a daemon now. Without one the session is there all the same. */
void rushes_session_connect(struct rushes_session *session);

/* A daemon that lives, as far as we know. */
bool rushes_session_has_daemon(const struct rushes_session *session);

/*
 * A file lacks bytes that some daemon has acknowledged, and there is none: look
 * for one now, and see that somebody writes them if none comes.
 */
void rushes_session_seek(struct rushes_session *session);
bool rushes_session_is_lost(const struct rushes_session *session);

/*
 * May a request have to wait for a daemon that is not there? As long as there
 * are bytes that a dead one had.
 */
bool rushes_session_may_wait(struct rushes_session *session);

/* For good: reads under way fail, their ground is pulled away. */
void rushes_session_disconnect(struct rushes_session *session);

/*
 * Is there a daemon that we do not know yet? Another smbd may have found it
 * already, and written through it: asked before everything that looks at a
 * file. Costs a comparison while there is a session, a stat of the socket while
 * there is none.
 */
void rushes_session_refresh(struct rushes_session *session);

/*
 * The daemon to read from, or NULL. It may be lost: then what concerns a file
 * with a fact waits for the next.
 */
struct rushes_client *rushes_session_for_read(struct rushes_session *session);

/* The daemon that must know about a change, or NULL. */
struct rushes_client *rushes_session_for_write(struct rushes_session *session);

/*
 * Nobody else starts to serve any more (rushes_plain_begin): is there no daemon
 * for us, or none that hears? Does not wait for one that is slow. False: there
 * is, or may be.
 */
bool rushes_session_is_alone(struct rushes_session *session);

/*
 * After every call of the client library that may have waited or failed: it
 * may have taken the doorbell of asynchronous reads with it, and may have
 * found the daemon dead. session->client may be NULL afterwards.
 */
void rushes_session_after_wait(struct rushes_session *session);

/*
 * Start a read of a named file; session, file and done_fn are set. False: not
 * taken, read it yourself. `data` stays valid until done_fn or
 * rushes_read_forget.
 */
bool rushes_read_start(struct rushes_read *read, void *data, size_t n,
		       off_t offset);

/* The same for a write, and for stable storage. */
bool rushes_write_start(struct rushes_read *read, const void *data, size_t n,
			off_t offset);
bool rushes_sync_start(struct rushes_read *read);

/*
 * For done_fn, in which nothing may wait: have plain_fn called soon, unless the
 * read is freed before. It is a talloc chunk of its own, or the head of one.
 * False: out of memory.
 */
bool rushes_read_defer(struct rushes_read *read, struct tevent_context *ev);

/* Its buffer is going away: done_fn will not be called. */
void rushes_read_forget(struct rushes_read *read);

/* A read under way of this file, or NULL. */
struct rushes_read *rushes_read_of(const struct rushes_fsp *file);

/*
 * What we know about an open file: the fsp's extension.
 */
struct rushes_fsp {
	/* Among the sources of copies; see rushes_copy_source */
	struct rushes_fsp *prev, *next;
	bool is_copy_source;

	/* The daemon knows that its blocks are another file's, too */
	bool is_shared_told;

	struct rushes_session *session;
	struct files_struct *fsp;

	/* As named to the daemon in session `number`; NULL: not named */
	struct rushes_file *file;
	uint64_t number;

	/* Plain I/O until then: the daemon did not want this file */
	uint64_t offer_ns;

	/* The daemon has answered a read of it since it was named */
	bool was_served;
	uint64_t offer_wait_ns;

	/* Of the descriptor, whatever modules above make of st_ex_ino */
	dev_t device;
	ino_t inode;

	/* Of its session's changes those that are of this file */
	uint32_t plain_count;

	/* It was changed by our own descriptor, which was not synced since */
	bool owes_sync;

	/* Something that has bytes of its own on a disk */
	bool is_regular;

	/* pwrite writes at the end whatever offset it is given */
	bool is_append;

	/* pwrite ends on stable storage */
	bool is_sync;

	/* May be named to the daemon by its path */
	bool is_servable;

	/* A kernel lease is held on our descriptor */
	bool is_leased;
};

/* NULL on IPC$, printers, and what smbd connects within itself. */
struct rushes_session *rushes_session_of(struct vfs_handle_struct *handle);

/* NULL: not a file with data of its own, or out of memory. */
struct rushes_fsp *rushes_fsp_get(struct vfs_handle_struct *handle,
				  struct files_struct *fsp);

/*
 * The file as the daemon knows it, to be read through it; NULL: read it
 * yourself. Names it to the daemon where that has not been done.
 */
struct rushes_fsp *rushes_fsp_for_read(struct vfs_handle_struct *handle,
				       struct files_struct *fsp);

/* Take a file's name back from the daemon. */
void rushes_fsp_unname(struct rushes_fsp *file);

/* The daemon said "read it yourself". */
void rushes_fsp_declined(struct rushes_fsp *file);

/*
 * Does this answer mean that we have to read it ourselves? The client gets to
 * hear what a disk says of its medium. Other errors are about the daemon
 * (a handle, a limit): our own descriptor knows better.
 */
bool rushes_is_plain(ssize_t result);

/*
 * Telling the daemon what was changed. All of these are called after the
 * change, keep errno, and are called for failed changes too: part of the
 * bytes may have been written.
 *
 * A length says that all of these bytes were written, so that the file is as
 * long at least and has blocks there. UINT64_MAX: nobody knows, from there on.
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

/* A multiple of the kernel's pages, on whatever machine. Units: bytes. */
#define RUSHES_PAGE 65536

/* Its length or blocks alone, from there on: no byte waits for a disk. */
void rushes_resized_fsp(struct vfs_handle_struct *handle,
			struct files_struct *fsp,
			uint64_t offset);

/*
 * The request of a change is thrown away: the client is gone. A thread of
 * vfs_default may have made the change, or be making it; what it writes after
 * this reaches the daemon as a foreign change. No daemon is looked for here, in
 * the middle of a destructor.
 */
void rushes_changed_orphan(struct vfs_handle_struct *handle,
			   struct files_struct *fsp,
			   uint64_t offset, uint64_t length);

/* Will a name's loss interest the daemon? Then say whose name it is. */
bool rushes_name_matters(struct vfs_handle_struct *handle,
			 struct files_struct *dirfsp,
			 const struct smb_filename *smb_fname,
			 SMB_STRUCT_STAT *st);
void rushes_gone_inode(struct vfs_handle_struct *handle,
		       const SMB_STRUCT_STAT *st);

/*
 * Writing through the daemon: see rushes_write.c.
 *
 * The file, to be written through the daemon; NULL: write it yourself.
 */
struct rushes_fsp *rushes_fsp_for_write(struct vfs_handle_struct *handle,
					struct files_struct *fsp);

/* As rushes_is_plain; a full disk is news for the client, too. */
bool rushes_write_is_plain(ssize_t result);

/* Does the daemon have bytes of it that the file system does not have? */
bool rushes_has_fact(struct rushes_session *session, dev_t device,
		     ino_t inode);

/*
 * Before a file is changed on its own descriptor: wait until it has all that
 * was acknowledged. rushes_changed_* ends this. False, with errno set: it never
 * will, and must be left alone. Nor does another daemon start to serve until
 * then, which would not know of the change.
 */
bool rushes_hold_fsp(struct vfs_handle_struct *handle,
		     struct files_struct *fsp);

/* One change of a file that rushes_hold_fsp let begin is over. */
void rushes_plain_ended(struct rushes_fsp *file);

/*
 * Before a file is read on its own descriptor: wait until it has all that was
 * acknowledged. Costs no system call when it has.
 */
bool rushes_settle_inode(struct rushes_session *session, dev_t device,
			 ino_t inode);
bool rushes_settle_fsp(struct vfs_handle_struct *handle,
		       struct files_struct *fsp);

/*
 * Before a file's time of change is set: a daemon that has bytes of it will not
 * set another. Does not wait for the bytes. False, with errno set: nobody can
 * be told.
 */
bool rushes_time_inode(struct rushes_session *session, dev_t device,
		       ino_t inode, struct timespec changed);

/*
 * What stat should have said of this name below this folder, or, without a
 * name, of this descriptor.
 */
void rushes_fix_stat(struct vfs_handle_struct *handle, SMB_STRUCT_STAT *st,
		     int fd, const char *name);

/*
 * A copy on the server may read from it; it is closed; and: a copy is about to
 * begin. It may go from one share to another, so all sessions' sources count.
 */
void rushes_copy_source(struct vfs_handle_struct *handle,
			struct files_struct *fsp);
void rushes_copy_source_closed(struct rushes_fsp *file);
bool rushes_settle_copy_sources(void);
void rushes_copied(void);

#endif /* RUSHES_DOOR_H */
