/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Samba's door to Rushes: reads come out of the daemon's cache, everything
 * that changes a file is told to the daemon before the client is answered.
 *
 *   [media]
 *   path = /srv/media
 *   vfs objects = rushes
 *   rushes:socket = /run/rushes/session.sock
 *   rushes:share = media
 *
 * Put it last in "vfs objects": it takes the place of vfs_default's I/O on
 * real descriptors, the modules before it translate names and streams.
 *
 * What it does not do: decide anything (which file is cached, read ahead,
 * refused: the daemon), keep data (writes go to the file at once), and fail:
 * whatever happens to the daemon, the same I/O on our own descriptor is always
 * right, because every write has passed through it. See engine/shm for the
 * client library; all calls to it are made from smbd's main thread.
 *
 * One tree connect is one session with the daemon. It is made as root, since
 * the daemon takes nobody else; after that no call needs a privilege, so that
 * it does not matter which user smbd is in a completion.
 *
 * A file is named to the daemon at its first read and not at its open. A data
 * open is two opens and a close of one fsp (first O_PATH, then the real one),
 * and most opens are made to look at a file, not to read it.
 *
 * The trick in the fall-back: a file's registration carries the number of the
 * session it was made in. When the daemon dies, the session's number moves on
 * and every registration is void at once, without a list of them.
 */

#include "includes.h"
#include "system/filesys.h"
#include "system/network.h"
#include "smbd/smbd.h"
#include "smbd/globals.h"
#include "lib/util/dlinklist.h"
#include "lib/util/iov_buf.h"
#include "lib/util/sys_rw.h"
#include "lib/util/tevent_ntstatus.h"
#include "lib/util/tevent_unix.h"
#include "lib/tsocket/tsocket.h"
#include "vfs_rushes_compat.h"
#include "rushes_client.h"

static int vfs_rushes_debug_level = DBGC_VFS;

#undef DBGC_CLASS
#define DBGC_CLASS vfs_rushes_debug_level

#define RUSHES_SOCKET_DEFAULT "/run/rushes/session.sock"

#define RUSHES_NS_PER_S UINT64_C(1000000000)

/*
 * Without a daemon we look for one once in this time. A file that the daemon
 * does not serve is offered to it again after it, then twice as long
 */
#define RUSHES_RETRY_NS RUSHES_NS_PER_S
#define RUSHES_OFFER_NS_MAX (64 * RUSHES_NS_PER_S)

/* No more than one part in this of our time goes into looking for a daemon. */
#define RUSHES_RETRY_SHARE 100

/*
 * A daemon that leaves a read alone for so long is hung; as HUNG_PATIENCE in
 * engine/shm for calls that wait. Clients give up at 20 to 60 seconds.
 */
#define RUSHES_HUNG_S 30
#define RUSHES_GUARD_S 5

/* A client who takes nothing for so long has its bytes copied and unpinned. */
#define RUSHES_SEND_STALL_MS 1000

struct rushes_pread_state;

/* One tree connect. */
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

	/* Asynchronous reads that the daemon has not answered, oldest first */
	struct rushes_pread_state *reads;

	/* Looks after them; see rushes_session_guard */
	struct tevent_timer *guard;

	/* Do not look for a daemon before; CLOCK_MONOTONIC_COARSE */
	uint64_t retry_ns;

	/* The socket file that last turned us away; see rushes_socket_is_new */
	struct stat refused;

	/* The absence is in the log already */
	bool absence_logged;
};

/* What we know about an open file: the fsp's extension. */
struct rushes_fsp {
	struct rushes_session *session;
	struct files_struct *fsp;

	/* As named to the daemon in session `number`; NULL: not named */
	struct rushes_file *file;
	uint64_t number;

	/* Plain I/O until then: the daemon did not want this file */
	uint64_t offer_ns;
	uint64_t offer_wait_ns;

	/* Of the descriptor, whatever modules above make of st_ex_ino */
	dev_t device;
	ino_t inode;

	/* Something that has bytes of its own on a disk */
	bool is_regular;

	/* pwrite writes at the end whatever offset it is given */
	bool is_append;

	/* May be named to the daemon by its path */
	bool is_servable;

	/* A kernel lease is held on our descriptor */
	bool is_leased;
};

static struct rushes_session *rushes_session_of(
	struct vfs_handle_struct *handle)
{
	/* NULL on IPC$, printers, and what smbd connects within itself */
	return (struct rushes_session *)handle->data;
}

/* Coarse: read from the vDSO, a few ns; good to some milliseconds. */
static uint64_t rushes_now_ns(void)
{
	struct timespec now = {0};

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * RUSHES_NS_PER_S + now.tv_nsec;
}

/*
 * The session with the daemon.
 */

static void rushes_pread_finish(struct rushes_pread_state *state,
				ssize_t result);
static void rushes_pread_abandon(struct rushes_pread_state *state);
static struct rushes_pread_state *rushes_pread_first_of(
	struct rushes_session *session, struct rushes_fsp *file);
static bool rushes_pread_is_older(const struct rushes_pread_state *state,
				  unsigned int seconds);

/*
 * Finish what the daemon has answered. Callbacks of the requests are deferred
 * to the event loop: no foreign code runs in here.
 */
static void rushes_session_collect(struct rushes_session *session)
{
	struct rushes_completion done[16];
	int count = 0;
	int i;

	do {
		count = rushes_poll(session->client, done, ARRAY_SIZE(done));
		for (i = 0; i < count; i++) {
			rushes_pread_finish(
				(struct rushes_pread_state *)
				done[i].private_data,
				done[i].result);
		}
	} while (count == ARRAY_SIZE(done));
}

/* End the session; outstanding reads go on as plain I/O. */
static void rushes_session_end(struct rushes_session *session)
{
	rushes_session_collect(session);

	while (session->reads != NULL) {
		rushes_pread_finish(session->reads, RUSHES_PLAIN);
	}

	TALLOC_FREE(session->fdes[0]);
	TALLOC_FREE(session->fdes[1]);
	rushes_disconnect(session->client);
	session->client = NULL;
	session->number += 1;
}

static void rushes_session_log_absence(struct rushes_session *session,
				       const char *reason)
{
	if (session->absence_logged) {
		return;
	}
	session->absence_logged = true;
	DBG_ERR("share %s: no daemon at %s (%s); plain I/O until there is "
		"one\n", session->share, session->socket_path, reason);
}

/* The daemon is dead. */
static void rushes_session_lost(struct rushes_session *session)
{
	rushes_session_end(session);
	rushes_session_log_absence(session, "it went away");
	session->retry_ns = 0;
}

static void rushes_session_readable(struct tevent_context *ev,
				    struct tevent_fd *fde,
				    uint16_t flags,
				    void *private_data)
{
	struct rushes_session *session = talloc_get_type_abort(
		private_data, struct rushes_session);

	if (session->client == NULL) {
		return;
	}
	rushes_session_collect(session);
	if (!rushes_alive(session->client)) {
		rushes_session_lost(session);
	}
}

static void rushes_session_guard(struct rushes_session *session);

static void rushes_session_guarded(struct tevent_context *ev,
				   struct tevent_timer *te,
				   struct timeval now,
				   void *private_data)
{
	struct rushes_session *session = talloc_get_type_abort(
		private_data, struct rushes_session);

	/* tevent frees a timer that has fired. */
	session->guard = NULL;
	if (session->reads == NULL) {
		return;
	}
	if (rushes_pread_is_older(session->reads, RUSHES_HUNG_S)) {
		rushes_session_end(session);
		session->retry_ns = rushes_now_ns() +
				    RUSHES_HUNG_S * RUSHES_NS_PER_S;
		rushes_session_log_absence(session, "it is hung");
		return;
	}
	rushes_session_guard(session);
}

/*
 * A dead daemon closes its socket, which wakes us; a hung one does nothing. One
 * timer for all reads, made anew only every few seconds: no cost per read.
 */
static void rushes_session_guard(struct rushes_session *session)
{
	if (session->guard != NULL) {
		return;
	}
	session->guard = tevent_add_timer(
		session->ev, session,
		tevent_timeval_current_ofs(RUSHES_GUARD_S, 0),
		rushes_session_guarded, session);
}

static bool rushes_session_watch(struct rushes_session *session)
{
	int fds[2] = { -1, -1 };
	int i;

	rushes_event_fds(session->client, fds);
	for (i = 0; i < 2; i++) {
		session->fdes[i] = tevent_add_fd(session->ev,
						 session,
						 fds[i],
						 TEVENT_FD_READ,
						 rushes_session_readable,
						 session);
		if (session->fdes[i] == NULL) {
			return false;
		}
	}
	return true;
}

/* Remember which socket turned us away. */
static void rushes_session_refused(struct rushes_session *session,
				   uint64_t started_ns,
				   const char *reason)
{
	uint64_t now_ns = rushes_now_ns();
	uint64_t spent_ns = now_ns - started_ns;

	session->retry_ns = now_ns + MAX(RUSHES_RETRY_NS,
					 spent_ns * RUSHES_RETRY_SHARE);
	if (stat(session->socket_path, &session->refused) == -1) {
		session->refused = (struct stat) {0};
	}
	rushes_session_log_absence(session, reason);
}

static void rushes_session_connect(struct rushes_session *session)
{
	const char *reason = NULL;
	uint64_t started_ns = rushes_now_ns();

	/* The daemon asks the socket who we are: uid 0 or nobody. */
	become_root();
	session->client = rushes_connect(session->socket_path,
					 RUSHES_DOOR_SMB,
					 session->share,
					 session->user,
					 session->address,
					 &reason);
	if (session->client == NULL) {
		rushes_session_refused(session, started_ns, reason);
	}
	unbecome_root();

	if (session->client == NULL) {
		return;
	}
	if (!rushes_session_watch(session)) {
		rushes_session_end(session);
		session->retry_ns = started_ns + RUSHES_RETRY_NS;
		rushes_session_log_absence(session, "out of memory");
		return;
	}
	DBG_NOTICE("share %s: session with the daemon at %s\n",
		   session->share, session->socket_path);
	session->absence_logged = false;
}

/*
 * The daemon to read from, or NULL. Costs a comparison while there is one, a
 * clock reading while there is none.
 */
static struct rushes_client *rushes_session_for_read(
	struct rushes_session *session)
{
	if (session->client != NULL && !rushes_alive(session->client)) {
		rushes_session_lost(session);
	}
	if (session->client == NULL && rushes_now_ns() >= session->retry_ns) {
		rushes_session_connect(session);
	}
	return session->client;
}

/*
 * Is there a socket that has not turned us away? A stat of something that is
 * mostly not there: less than a microsecond.
 */
static bool rushes_socket_is_new(struct rushes_session *session)
{
	struct stat st = {0};

	if (stat(session->socket_path, &st) == -1) {
		return false;
	}

	/* An inode number may be used again at once: the times tell. */
	return st.st_dev != session->refused.st_dev ||
	       st.st_ino != session->refused.st_ino ||
	       st.st_ctim.tv_sec != session->refused.st_ctim.tv_sec ||
	       st.st_ctim.tv_nsec != session->refused.st_ctim.tv_nsec;
}

/*
 * The daemon that must know about a change, or NULL. A second's patience, as
 * for reads, is not allowed here: another smbd may have found the new daemon
 * already and read the old bytes through it.
 */
static struct rushes_client *rushes_session_for_write(
	struct rushes_session *session)
{
	struct rushes_client *client = rushes_session_for_read(session);

	if (client == NULL && rushes_socket_is_new(session)) {
		rushes_session_connect(session);
		client = session->client;
	}
	return client;
}

/*
 * A blocking call to the daemon may have taken the doorbell of asynchronous
 * reads with it, and may have found the daemon dead.
 */
static void rushes_session_after_wait(struct rushes_session *session)
{
	if (session->reads != NULL) {
		rushes_session_collect(session);
	}
	if (!rushes_alive(session->client)) {
		rushes_session_lost(session);
	}
}

/*
 * What we know about an open file.
 */

static bool rushes_fsp_is_named(const struct rushes_fsp *file)
{
	return file->file != NULL && file->session->client != NULL &&
	       file->number == file->session->number;
}

/* Take a file's name back from the daemon. */
static void rushes_fsp_unname(struct rushes_fsp *file)
{
	struct rushes_pread_state *read = NULL;

	/*
	 * smbd closes no file with requests outstanding (it would panic); if
	 * it ever does, they must not complete into freed memory.
	 */
	while ((read = rushes_pread_first_of(file->session, file)) != NULL) {
		rushes_pread_abandon(read);
	}
	if (rushes_fsp_is_named(file)) {
		rushes_close(file->file);
	}
	file->file = NULL;
}

static void rushes_fsp_destroy(void *p_data)
{
	rushes_fsp_unname((struct rushes_fsp *)p_data);
}

static void rushes_fsp_identify(struct rushes_fsp *file)
{
	struct files_struct *fsp = file->fsp;
	int fd = fsp_get_io_fd(fsp);
	struct stat st = {0};

	if (fstat(fd, &st) == -1 || !S_ISREG(st.st_mode)) {
		return;
	}
	file->is_regular = true;
	file->device = st.st_dev;
	file->inode = st.st_ino;
	file->is_append = (fcntl(fd, F_GETFL, 0) & O_APPEND) != 0;

	/*
	 * A stream's bytes lie elsewhere than its name says, and a snapshot's
	 * name is that of the living file: neither can be told by a path.
	 */
	file->is_servable = !fsp_is_alternate_stream(fsp) &&
			    fsp->fsp_name->twrp == 0;
}

/* NULL: not a file with data of its own, or out of memory. */
static struct rushes_fsp *rushes_fsp_get(struct vfs_handle_struct *handle,
					 struct files_struct *fsp)
{
	struct rushes_fsp *file = NULL;

	file = (struct rushes_fsp *)VFS_FETCH_FSP_EXTENSION(handle, fsp);
	if (file != NULL) {
		return file;
	}
	if (fsp->fsp_flags.is_pathref || fsp->fsp_flags.is_directory ||
	    fsp->fake_file_handle != NULL || fsp->print_file != NULL)
	{
		return NULL;
	}
	file = VFS_ADD_FSP_EXTENSION(handle, fsp, struct rushes_fsp,
				     rushes_fsp_destroy);
	if (file == NULL) {
		return NULL;
	}
	file->session = rushes_session_of(handle);
	file->fsp = fsp;
	rushes_fsp_identify(file);
	return file;
}

/* Name a file to the daemon. */
static bool rushes_fsp_name(struct rushes_fsp *file)
{
	struct rushes_session *session = file->session;
	const char *path = file->fsp->fsp_name->base_name;

	while (path[0] == '.' && path[1] == '/') {
		path += 2;
	}
	file->file = rushes_open(session->client,
				 fsp_get_io_fd(file->fsp),
				 path);
	file->number = session->number;
	if (file->file == NULL && !rushes_alive(session->client)) {
		rushes_session_lost(session);
	}
	return file->file != NULL;
}

/*
 * The file as the daemon knows it, to be read through it; NULL: read it
 * yourself. Names it to the daemon where that has not been done.
 */
static struct rushes_fsp *rushes_fsp_for_read(struct vfs_handle_struct *handle,
					      struct files_struct *fsp)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct rushes_fsp *file = NULL;

	if (session == NULL || rushes_session_for_read(session) == NULL) {
		return NULL;
	}
	file = rushes_fsp_get(handle, fsp);
	if (file == NULL || !file->is_servable || file->is_leased) {
		return NULL;
	}
	if (file->offer_ns != 0) {
		if (rushes_now_ns() < file->offer_ns) {
			return NULL;
		}

		/* The daemon remembers its answer as long as the name. */
		rushes_fsp_unname(file);
		file->offer_ns = 0;
	}
	if (!rushes_fsp_is_named(file) && !rushes_fsp_name(file)) {
		return NULL;
	}
	return file;
}

/*
 * The daemon said "read it yourself": it does not serve this file. Asking at
 * every read would cost a round trip each; asking never again would keep a
 * file plain for good that a reloaded configuration serves. A dead daemon
 * says it as well; its successor is asked at once.
 */
static void rushes_fsp_declined(struct rushes_fsp *file)
{
	if (file->offer_ns != 0 || !rushes_alive(file->session->client)) {
		return;
	}
	file->offer_wait_ns = MIN(RUSHES_OFFER_NS_MAX,
				  MAX(RUSHES_RETRY_NS,
				      2 * file->offer_wait_ns));
	file->offer_ns = rushes_now_ns() + file->offer_wait_ns;
}

/*
 * Does this answer mean that we have to read it ourselves? The client gets to
 * hear what a disk says of its medium. Other errors are about the daemon
 * (a handle, a limit): our own descriptor knows better.
 */
static bool rushes_is_plain(ssize_t result)
{
	switch (result) {
	case -EIO:
	case -ENODATA:
	case -EREMOTEIO:
	case -EILSEQ:
	case -ETIMEDOUT:
		return false;
	default:
		return result < 0;
	}
}

/*
 * Telling the daemon what was changed. All of these are called after the
 * change, keep errno, and are called for failed changes too: part of the
 * bytes may have been written.
 */

static void rushes_changed_inode(struct rushes_session *session,
				 dev_t device, ino_t inode,
				 uint64_t offset, uint64_t length)
{
	struct rushes_client *client = NULL;
	int attempt;

	/*
	 * A daemon that dies while we tell it may already have a successor,
	 * which has to be told instead.
	 */
	for (attempt = 0; attempt < 2; attempt++) {
		client = rushes_session_for_write(session);
		if (client == NULL) {
			return;
		}
		rushes_changed(client, device, inode, offset, length);
		rushes_session_after_wait(session);
		if (session->client != NULL) {
			return;
		}
	}
}

static void rushes_changed_fsp(struct vfs_handle_struct *handle,
			       struct files_struct *fsp,
			       uint64_t offset, uint64_t length)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct rushes_fsp *file = NULL;
	int saved_errno = errno;

	if (session == NULL || rushes_session_for_write(session) == NULL) {
		goto done;
	}
	file = rushes_fsp_get(handle, fsp);
	if (file == NULL || !file->is_regular) {
		goto done;
	}
	if (file->is_append) {
		offset = 0;
		length = UINT64_MAX;
	}
	rushes_changed_inode(session, file->device, file->inode,
			     offset, length);
done:
	errno = saved_errno;
}

/*
 * The request of a change is thrown away: the client is gone. A thread of
 * vfs_default may have made the change, or be making it; what it writes after
 * this reaches the daemon as a foreign change. No daemon is looked for here, in
 * the middle of a destructor.
 */
static void rushes_changed_orphan(struct vfs_handle_struct *handle,
				  struct files_struct *fsp,
				  uint64_t offset, uint64_t length)
{
	struct rushes_session *session = rushes_session_of(handle);

	if (session != NULL && session->client != NULL) {
		rushes_changed_fsp(handle, fsp, offset, length);
	}
}

/* Will a name's loss interest the daemon? Then say whose name it is. */
static bool rushes_name_matters(struct vfs_handle_struct *handle,
				struct files_struct *dirfsp,
				const struct smb_filename *smb_fname,
				SMB_STRUCT_STAT *st)
{
	struct rushes_session *session = rushes_session_of(handle);
	int saved_errno = errno;
	int ret;

	if (session == NULL || is_named_stream(smb_fname) ||
	    rushes_session_for_write(session) == NULL)
	{
		errno = saved_errno;
		return false;
	}
	ret = SMB_VFS_NEXT_FSTATAT(handle, dirfsp, smb_fname, st,
				   AT_SYMLINK_NOFOLLOW);
	errno = saved_errno;
	return ret == 0 && S_ISREG(st->st_ex_mode);
}

static void rushes_gone_inode(struct vfs_handle_struct *handle,
			      const SMB_STRUCT_STAT *st)
{
	struct rushes_session *session = rushes_session_of(handle);
	int saved_errno = errno;
	int attempt;

	for (attempt = 0; attempt < 2; attempt++) {
		struct rushes_client *client =
			rushes_session_for_write(session);
		if (client == NULL) {
			break;
		}
		rushes_gone(client, st->st_ex_dev, st->st_ex_ino);
		rushes_session_after_wait(session);
		if (session->client != NULL) {
			break;
		}
	}
	errno = saved_errno;
}

/*
 * Connecting.
 */

static int vfs_rushes_connect(struct vfs_handle_struct *handle,
			      const char *service,
			      const char *user)
{
	struct connection_struct *conn = handle->conn;
	struct rushes_session *session = NULL;
	int snum = SNUM(conn);
	char *address = NULL;
	int ret;

	ret = SMB_VFS_NEXT_CONNECT(handle, service, user);
	if (ret < 0) {
		return ret;
	}

	/* Nothing to play on these; smbd's own connections have no client. */
	if (IS_IPC(conn) || IS_PRINT(conn) || conn->sconn == NULL ||
	    conn->sconn->remote_address == NULL)
	{
		return 0;
	}

	session = talloc_zero(conn, struct rushes_session);
	if (session == NULL) {
		goto nomem;
	}
	session->ev = conn->sconn->ev_ctx;
	session->socket_path = talloc_strdup(
		session, lp_parm_const_string(snum, "rushes", "socket",
					      RUSHES_SOCKET_DEFAULT));
	session->share = talloc_strdup(
		session, lp_parm_const_string(snum, "rushes", "share",
					      lp_const_servicename(snum)));
	session->user = talloc_strdup(session, user);
	address = tsocket_address_inet_addr_string(
		conn->sconn->remote_address, session);
	session->address = (address != NULL) ? address : "";
	if (session->socket_path == NULL || session->share == NULL ||
	    session->user == NULL)
	{
		goto nomem;
	}

	SMB_VFS_HANDLE_SET_DATA(handle, session, NULL,
				struct rushes_session, goto nomem);
	rushes_session_connect(session);
	return 0;

nomem:
	TALLOC_FREE(session);
	SMB_VFS_NEXT_DISCONNECT(handle);
	errno = ENOMEM;
	return -1;
}

static void vfs_rushes_disconnect(struct vfs_handle_struct *handle)
{
	struct rushes_session *session = rushes_session_of(handle);

	if (session != NULL) {
		/*
		 * smbd has closed all files. Should a read still be on its
		 * way, it ends here: its buffer and its conn go away.
		 */
		while (session->reads != NULL) {
			rushes_pread_abandon(session->reads);
		}
		if (session->client != NULL) {
			rushes_session_end(session);
		}
		handle->data = NULL;
		TALLOC_FREE(session);
	}
	SMB_VFS_NEXT_DISCONNECT(handle);
}

/*
 * Opening and closing.
 */

static int vfs_rushes_openat(struct vfs_handle_struct *handle,
			     const struct files_struct *dirfsp,
			     const struct smb_filename *smb_fname,
			     struct files_struct *fsp,
			     const struct vfs_open_how *how)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct stat st = {0};
	int fd;

	fd = SMB_VFS_NEXT_OPENAT(handle, dirfsp, smb_fname, fsp, how);

	/* smbd itself truncates by ftruncate, but a module may do it here. */
	if (fd == -1 || (how->flags & O_TRUNC) == 0 || session == NULL) {
		return fd;
	}
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
		rushes_changed_inode(session, st.st_dev, st.st_ino,
				     0, UINT64_MAX);
	}
	return fd;
}

static int vfs_rushes_close(struct vfs_handle_struct *handle,
			    struct files_struct *fsp)
{
	/*
	 * Also called for the O_PATH descriptor of an fsp that lives on, but
	 * then it has not been read and there is nothing to remove.
	 */
	VFS_REMOVE_FSP_EXTENSION(handle, fsp);
	return SMB_VFS_NEXT_CLOSE(handle, fsp);
}

/*
 * Reading.
 */

/* Read and wait. As rushes_read; RUSHES_PLAIN also for the daemon's errors. */
static ssize_t rushes_read_wait(struct rushes_fsp *file, void *data,
				size_t n, off_t offset)
{
	struct rushes_session *session = file->session;
	ssize_t ret;

	ret = rushes_read(file->file, data, n, offset);
	if (rushes_is_plain(ret)) {
		rushes_fsp_declined(file);
		ret = RUSHES_PLAIN;
	}
	rushes_session_after_wait(session);
	return ret;
}

static ssize_t vfs_rushes_pread(struct vfs_handle_struct *handle,
				struct files_struct *fsp,
				void *data, size_t n, off_t offset)
{
	struct rushes_fsp *file = NULL;
	ssize_t ret = RUSHES_PLAIN;

	if (n > 0 && offset >= 0) {
		file = rushes_fsp_for_read(handle, fsp);
	}
	if (file != NULL) {
		ret = rushes_read_wait(file, data, n, offset);
	}
	if (ret == RUSHES_PLAIN) {
		return SMB_VFS_NEXT_PREAD(handle, fsp, data, n, offset);
	}
	if (ret < 0) {
		errno = -ret;
		return -1;
	}
	return ret;
}

struct rushes_pread_state {
	struct rushes_pread_state *prev, *next;
	struct tevent_req *req;
	struct tevent_context *ev;
	struct vfs_handle_struct *handle;
	struct rushes_session *session;
	struct rushes_fsp *file;
	struct files_struct *fsp;
	void *data;
	size_t n;
	off_t offset;
	ssize_t ret;
	uint64_t ticket;
	struct timespec start_time;
	struct vfs_aio_state vfs_aio_state;
};

static void rushes_pread_plain_done(struct tevent_req *subreq);

static struct rushes_pread_state *rushes_pread_first_of(
	struct rushes_session *session, struct rushes_fsp *file)
{
	struct rushes_pread_state *state = NULL;

	for (state = session->reads; state != NULL; state = state->next) {
		if (state->file == file) {
			break;
		}
	}
	return state;
}

static bool rushes_pread_is_older(const struct rushes_pread_state *state,
				  unsigned int seconds)
{
	struct timespec now = {0};

	clock_gettime_mono(&now);
	return nsec_time_diff(&now, &state->start_time) >
	       (int64_t)seconds * (int64_t)RUSHES_NS_PER_S;
}

/* The daemon owes us nothing more for this request. */
static void rushes_pread_settled(struct rushes_pread_state *state)
{
	talloc_set_destructor(state, NULL);
	DLIST_REMOVE(state->session->reads, state);
	state->ticket = 0;
}

static int rushes_pread_state_destructor(struct rushes_pread_state *state)
{
	/*
	 * The request is thrown away (the client is gone) and its buffer with
	 * it. The library alone writes to the buffer, in rushes_poll: when the
	 * read is forgotten, the buffer is free.
	 */
	rushes_read_cancel(state->session->client, state->ticket);
	rushes_pread_settled(state);
	return 0;
}

/* The ground is pulled away from under a read. */
static void rushes_pread_abandon(struct rushes_pread_state *state)
{
	rushes_read_cancel(state->session->client, state->ticket);
	rushes_pread_settled(state);
	tevent_req_error(state->req, EBADF);
}

static bool rushes_pread_submit(struct rushes_pread_state *state)
{
	state->ticket = rushes_read_send(state->file->file, state->data,
					 state->n, state->offset, state);
	if (state->ticket == 0) {
		return false;
	}
	DLIST_ADD_END(state->session->reads, state);
	talloc_set_destructor(state, rushes_pread_state_destructor);
	rushes_session_guard(state->session);
	return true;
}

/* From our own descriptor. */
static void rushes_pread_plain(struct rushes_pread_state *state)
{
	struct tevent_req *subreq = NULL;

	subreq = SMB_VFS_NEXT_PREAD_SEND(state, state->ev, state->handle,
					 state->fsp, state->data, state->n,
					 state->offset);
	if (tevent_req_nomem(subreq, state->req)) {
		return;
	}
	tevent_req_set_callback(subreq, rushes_pread_plain_done, state->req);
}

static void rushes_pread_plain_done(struct tevent_req *subreq)
{
	struct tevent_req *req = tevent_req_callback_data(
		subreq, struct tevent_req);
	struct rushes_pread_state *state = tevent_req_data(
		req, struct rushes_pread_state);

	state->ret = SMB_VFS_PREAD_RECV(subreq, &state->vfs_aio_state);
	TALLOC_FREE(subreq);
	if (state->ret == -1) {
		tevent_req_error(req, state->vfs_aio_state.error);
		return;
	}
	tevent_req_done(req);
}

/*
 * The daemon's answer, or RUSHES_PLAIN because it is gone. Only called inside
 * a _send function or after tevent_req_defer_callback.
 */
static void rushes_pread_finish(struct rushes_pread_state *state,
				ssize_t result)
{
	struct timespec end_time = {0};

	rushes_pread_settled(state);
	if (rushes_is_plain(result)) {
		rushes_fsp_declined(state->file);
		rushes_pread_plain(state);
		return;
	}
	if (result < 0) {
		tevent_req_error(state->req, -result);
		return;
	}

	/* Short only at the end of the file */
	state->ret = result;
	clock_gettime_mono(&end_time);
	state->vfs_aio_state.duration = nsec_time_diff(&end_time,
						       &state->start_time);
	tevent_req_done(state->req);
}

static struct tevent_req *vfs_rushes_pread_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct files_struct *fsp,
	void *data,
	size_t n,
	off_t offset)
{
	struct tevent_req *req = NULL;
	struct rushes_pread_state *state = NULL;
	struct rushes_fsp *file = NULL;

	if (n > 0 && offset >= 0) {
		file = rushes_fsp_for_read(handle, fsp);
	}
	if (file == NULL) {
		/* Not even a request of our own; see vfs_rushes_pread_recv. */
		return SMB_VFS_NEXT_PREAD_SEND(mem_ctx, ev, handle, fsp,
					       data, n, offset);
	}

	req = tevent_req_create(mem_ctx, &state, struct rushes_pread_state);
	if (req == NULL) {
		return NULL;
	}
	*state = (struct rushes_pread_state) {
		.req = req,
		.ev = ev,
		.handle = handle,
		.session = file->session,
		.file = file,
		.fsp = fsp,
		.data = data,
		.n = n,
		.offset = offset,
	};
	clock_gettime_mono(&state->start_time);

	if (!rushes_pread_submit(state)) {
		rushes_pread_plain(state);
		if (!tevent_req_is_in_progress(req)) {
			return tevent_req_post(req, ev);
		}
	}
	tevent_req_defer_callback(req, ev);
	return req;
}

static ssize_t vfs_rushes_pread_recv(struct tevent_req *req,
				     struct vfs_aio_state *vfs_aio_state)
{
	struct rushes_pread_state *state = talloc_get_type(
		_tevent_req_data(req), struct rushes_pread_state);
	ssize_t ret;

	if (state == NULL) {
		/* The request of the module below, handed out as it was. */
		return SMB_VFS_PREAD_RECV(req, vfs_aio_state);
	}
	if (tevent_req_is_unix_error(req, &vfs_aio_state->error)) {
		tevent_req_received(req);
		return -1;
	}
	*vfs_aio_state = state->vfs_aio_state;
	ret = state->ret;
	tevent_req_received(req);
	return ret;
}

/*
 * Sending a file's bytes to the client's socket. They are copied by the
 * kernel, not handed over: a page of the cache is reused as soon as it is
 * unpinned, and the network may want to send it again long after that.
 */

/* Wait until the socket takes more. 0 when it did not within `timeout_ms`. */
static int rushes_send_wait(int fd, int timeout_ms)
{
	struct pollfd pfd = { .fd = fd, .events = POLLOUT };
	int ret;

	do {
		ret = poll(&pfd, 1, timeout_ms);
	} while (ret == -1 && errno == EINTR);
	return ret;
}

/*
 * Send all of it. 1: done; 0: the client stalled (what is left stands in *iov
 * and *iov_count; only with timeout_ms >= 0); -1: error.
 */
static int rushes_send_iov(int fd, struct iovec **iov, int *iov_count,
			   int timeout_ms)
{
	while (*iov_count > 0) {
		struct msghdr msg = {
			.msg_iov = *iov,
			.msg_iovlen = *iov_count,
		};
		ssize_t sent;
		int ret;

		/* smbd's socket is non-blocking for SMB2 */
		sent = sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (sent >= 0) {
			if (!iov_advance(iov, iov_count, sent)) {
				errno = EIO;
				return -1;
			}
			continue;
		}
		if (errno == EINTR) {
			continue;
		}
		if (errno != EAGAIN && errno != EWOULDBLOCK) {
			return -1;
		}
		ret = rushes_send_wait(fd, timeout_ms);
		if (ret <= 0) {
			return ret;
		}
	}
	return 1;
}

/* Send what is left of a lease from memory of our own, the lease released. */
static int rushes_send_stalled(int fd, struct rushes_fsp *file,
			       struct rushes_lease *lease,
			       const struct iovec *iov, int iov_count)
{
	ssize_t length = iov_buflen(iov, iov_count);
	struct iovec rest = {0};
	struct iovec *next = &rest;
	int next_count = 1;
	uint8_t *copy = NULL;
	int ret = -1;

	copy = iov_concat(talloc_tos(), iov, iov_count);
	rushes_read_end(file->file, lease);
	if (length == -1 || copy == NULL) {
		errno = ENOMEM;
		return -1;
	}
	rest.iov_base = copy;
	rest.iov_len = length;
	ret = rushes_send_iov(fd, &next, &next_count, -1);
	TALLOC_FREE(copy);
	return ret;
}

/* Send header (may be NULL) and lease, and release the lease. */
static bool rushes_send_lease(int fd, const DATA_BLOB *header,
			      struct rushes_fsp *file,
			      struct rushes_lease *lease)
{
	struct iovec all[1 + RUSHES_LEASE_IOV_MAX] = {{0}};
	struct iovec *iov = all;
	int iov_count = 0;
	int saved_errno;
	int ret;
	int i;

	if (header != NULL) {
		all[iov_count].iov_base = header->data;
		all[iov_count].iov_len = header->length;
		iov_count += 1;
	}
	for (i = 0; i < lease->iov_count; i++) {
		all[iov_count] = lease->iov[i];
		iov_count += 1;
	}
	ret = rushes_send_iov(fd, &iov, &iov_count, RUSHES_SEND_STALL_MS);
	if (ret == 0) {
		ret = rushes_send_stalled(fd, file, lease, iov, iov_count);
	} else {
		saved_errno = errno;
		rushes_read_end(file->file, lease);
		errno = saved_errno;
	}
	return ret == 1;
}

/*
 * The daemon left us in the middle of an answer whose length the client has
 * been told: the rest from our own descriptor. Bytes sent, short at the end of
 * the file; -1 on error.
 */
static ssize_t rushes_send_plain(struct vfs_handle_struct *handle, int fd,
				 struct files_struct *fsp,
				 off_t offset, size_t n)
{
	size_t buffer_size = MIN(n, 256 * 1024);
	uint8_t *buffer = NULL;
	size_t total = 0;
	ssize_t ret = 0;

	buffer = talloc_array(talloc_tos(), uint8_t, buffer_size);
	if (buffer == NULL) {
		errno = ENOMEM;
		return -1;
	}
	while (total < n) {
		struct iovec part = { .iov_base = buffer };
		struct iovec *iov = &part;
		int iov_count = 1;

		ret = SMB_VFS_NEXT_PREAD(handle, fsp, buffer,
					 MIN(buffer_size, n - total),
					 offset + total);
		if (ret <= 0) {
			break;
		}
		part.iov_len = ret;
		total += ret;
		ret = rushes_send_iov(fd, &iov, &iov_count, -1);
		if (ret == -1) {
			break;
		}
	}
	TALLOC_FREE(buffer);
	return (ret == -1) ? -1 : (ssize_t)total;
}

/*
 * After the header is out: the rest of `n` bytes, `total` of which are sent.
 * What was sent in all, short at the end of the file; -1 on error.
 */
static ssize_t rushes_send_rest(struct vfs_handle_struct *handle, int fd,
				struct files_struct *fsp,
				off_t offset, size_t n, size_t total)
{
	while (total < n) {
		struct rushes_lease lease = {0};
		struct rushes_fsp *file = rushes_fsp_for_read(handle, fsp);
		ssize_t ret = RUSHES_PLAIN;

		if (file != NULL) {
			ret = rushes_read_begin(file->file, n - total,
						offset + total, &lease);
		}
		if (ret != 0) {
			ret = rushes_send_plain(handle, fd, fsp,
						offset + total, n - total);
			return (ret == -1) ? -1 : (ssize_t)(total + ret);
		}
		if (lease.length == 0) {
			rushes_read_end(file->file, &lease);
			break;
		}
		total += lease.length;
		if (!rushes_send_lease(fd, NULL, file, &lease)) {
			return -1;
		}
	}
	return total;
}

/*
 * The contract is that of sys_sendfile: header and bytes in all; less at the
 * end of the file (the caller then fills up with zeros); 0 when nothing at all
 * was sent (the caller then reads and writes); -1 ends the connection, except
 * for ENOSYS, ENOTSUP and EINTR, which mean something to the caller and must
 * not come from here.
 */
static ssize_t vfs_rushes_sendfile(struct vfs_handle_struct *handle,
				   int tofd,
				   struct files_struct *fromfsp,
				   const DATA_BLOB *header,
				   off_t offset,
				   size_t n)
{
	struct rushes_lease lease = {0};
	struct rushes_fsp *file = NULL;
	size_t header_length = (header != NULL) ? header->length : 0;
	ssize_t ret = RUSHES_PLAIN;

	if (n > 0 && offset >= 0) {
		file = rushes_fsp_for_read(handle, fromfsp);
	}
	if (file != NULL) {
		ret = rushes_read_begin(file->file, n, offset, &lease);
		if (rushes_is_plain(ret)) {
			rushes_fsp_declined(file);
		}
	}
	if (ret != 0) {
		/* Errors too: the disk may tell them to sendfile itself. */
		if (file != NULL) {
			rushes_session_after_wait(file->session);
		}
		return SMB_VFS_NEXT_SENDFILE(handle, tofd, fromfsp, header,
					     offset, n);
	}
	if (lease.length == 0) {
		rushes_read_end(file->file, &lease);
		rushes_session_after_wait(file->session);
		return 0;
	}

	ret = lease.length;
	if (!rushes_send_lease(tofd, header, file, &lease)) {
		ret = -1;
	}
	rushes_session_after_wait(file->session);
	if (ret != -1) {
		ret = rushes_send_rest(handle, tofd, fromfsp, offset, n, ret);
	}
	if (ret == -1) {
		if (errno == ENOSYS || errno == ENOTSUP || errno == EINTR) {
			errno = EIO;
		}
		return -1;
	}
	return header_length + ret;
}

/*
 * Writing.
 */

static ssize_t vfs_rushes_recvfile(struct vfs_handle_struct *handle,
				   int fromfd,
				   struct files_struct *tofsp,
				   off_t offset,
				   size_t n)
{
	ssize_t ret;

	ret = SMB_VFS_NEXT_RECVFILE(handle, fromfd, tofsp, offset, n);
	rushes_changed_fsp(handle, tofsp, offset, n);
	return ret;
}

static ssize_t vfs_rushes_pwrite(struct vfs_handle_struct *handle,
				 struct files_struct *fsp,
				 const void *data, size_t n, off_t offset)
{
	ssize_t ret;

	ret = SMB_VFS_NEXT_PWRITE(handle, fsp, data, n, offset);
	rushes_changed_fsp(handle, fsp, offset, n);
	return ret;
}

struct rushes_pwrite_state {
	struct vfs_handle_struct *handle;
	struct files_struct *fsp;
	off_t offset;
	size_t n;
	ssize_t ret;
	struct vfs_aio_state vfs_aio_state;
};

static void rushes_pwrite_done(struct tevent_req *subreq);

static int rushes_pwrite_state_destructor(struct rushes_pwrite_state *state)
{
	rushes_changed_orphan(state->handle, state->fsp,
			      state->offset, state->n);
	return 0;
}

static struct tevent_req *vfs_rushes_pwrite_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct files_struct *fsp,
	const void *data,
	size_t n,
	off_t offset)
{
	struct tevent_req *req = NULL;
	struct tevent_req *subreq = NULL;
	struct rushes_pwrite_state *state = NULL;

	if (rushes_session_of(handle) == NULL) {
		return SMB_VFS_NEXT_PWRITE_SEND(mem_ctx, ev, handle, fsp,
						data, n, offset);
	}

	/*
	 * Also without a daemon: there may be one when the write is done, and
	 * it may have read the old bytes.
	 */
	req = tevent_req_create(mem_ctx, &state, struct rushes_pwrite_state);
	if (req == NULL) {
		return NULL;
	}
	*state = (struct rushes_pwrite_state) {
		.handle = handle,
		.fsp = fsp,
		.offset = offset,
		.n = n,
	};
	subreq = SMB_VFS_NEXT_PWRITE_SEND(state, ev, handle, fsp,
					  data, n, offset);
	if (tevent_req_nomem(subreq, req)) {
		return tevent_req_post(req, ev);
	}
	tevent_req_set_callback(subreq, rushes_pwrite_done, req);
	talloc_set_destructor(state, rushes_pwrite_state_destructor);
	return req;
}

static void rushes_pwrite_done(struct tevent_req *subreq)
{
	struct tevent_req *req = tevent_req_callback_data(
		subreq, struct tevent_req);
	struct rushes_pwrite_state *state = tevent_req_data(
		req, struct rushes_pwrite_state);

	state->ret = SMB_VFS_PWRITE_RECV(subreq, &state->vfs_aio_state);
	TALLOC_FREE(subreq);
	talloc_set_destructor(state, NULL);
	rushes_changed_fsp(state->handle, state->fsp, state->offset, state->n);
	if (state->ret == -1) {
		tevent_req_error(req, state->vfs_aio_state.error);
		return;
	}
	tevent_req_done(req);
}

static ssize_t vfs_rushes_pwrite_recv(struct tevent_req *req,
				      struct vfs_aio_state *vfs_aio_state)
{
	struct rushes_pwrite_state *state = talloc_get_type(
		_tevent_req_data(req), struct rushes_pwrite_state);
	ssize_t ret;

	if (state == NULL) {
		return SMB_VFS_PWRITE_RECV(req, vfs_aio_state);
	}
	if (tevent_req_is_unix_error(req, &vfs_aio_state->error)) {
		tevent_req_received(req);
		return -1;
	}
	*vfs_aio_state = state->vfs_aio_state;
	ret = state->ret;
	tevent_req_received(req);
	return ret;
}

static int vfs_rushes_ftruncate(struct vfs_handle_struct *handle,
				struct files_struct *fsp,
				off_t length)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct stat st = {0};
	off_t from = 0;
	int ret;

	/*
	 * Shorter: what is behind the new end changes. Longer: what is behind
	 * the old one. An overwrite of the whole when we cannot say.
	 */
	if (session != NULL && session->client != NULL &&
	    fstat(fsp_get_io_fd(fsp), &st) == 0)
	{
		from = MIN(st.st_size, length);
	}
	ret = SMB_VFS_NEXT_FTRUNCATE(handle, fsp, length);
	rushes_changed_fsp(handle, fsp, MAX(from, 0), UINT64_MAX);
	return ret;
}

static int vfs_rushes_fallocate(struct vfs_handle_struct *handle,
				struct files_struct *fsp,
				uint32_t mode,
				off_t offset,
				off_t len)
{
	int ret;

	ret = SMB_VFS_NEXT_FALLOCATE(handle, fsp, mode, offset, len);
	rushes_changed_fsp(handle, fsp, offset, len);
	return ret;
}

/*
 * Server-side copy. The bytes are moved on the descriptors themselves; that
 * their source is right needs no help, as no write stays in the cache.
 */

struct rushes_offload_write_state {
	struct vfs_handle_struct *handle;
	struct files_struct *dest_fsp;
	off_t dest_off;
	off_t to_copy;
	off_t copied;
};

static void rushes_offload_write_done(struct tevent_req *subreq);

static int rushes_offload_write_state_destructor(
	struct rushes_offload_write_state *state)
{
	rushes_changed_orphan(state->handle, state->dest_fsp,
			      state->dest_off, state->to_copy);
	return 0;
}

static struct tevent_req *vfs_rushes_offload_write_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	uint32_t fsctl,
	DATA_BLOB *token,
	off_t transfer_offset,
	struct files_struct *dest_fsp,
	off_t dest_off,
	off_t to_copy)
{
	struct tevent_req *req = NULL;
	struct tevent_req *subreq = NULL;
	struct rushes_offload_write_state *state = NULL;

	req = tevent_req_create(mem_ctx, &state,
				struct rushes_offload_write_state);
	if (req == NULL) {
		return NULL;
	}
	*state = (struct rushes_offload_write_state) {
		.handle = handle,
		.dest_fsp = dest_fsp,
		.dest_off = dest_off,
		.to_copy = to_copy,
	};
	subreq = SMB_VFS_NEXT_OFFLOAD_WRITE_SEND(handle, state, ev, fsctl,
						 token, transfer_offset,
						 dest_fsp, dest_off, to_copy);
	if (tevent_req_nomem(subreq, req)) {
		return tevent_req_post(req, ev);
	}
	tevent_req_set_callback(subreq, rushes_offload_write_done, req);
	talloc_set_destructor(state, rushes_offload_write_state_destructor);
	return req;
}

static void rushes_offload_write_done(struct tevent_req *subreq)
{
	struct tevent_req *req = tevent_req_callback_data(
		subreq, struct tevent_req);
	struct rushes_offload_write_state *state = tevent_req_data(
		req, struct rushes_offload_write_state);
	NTSTATUS status;

	status = SMB_VFS_NEXT_OFFLOAD_WRITE_RECV(state->handle, subreq,
						 &state->copied);
	TALLOC_FREE(subreq);
	talloc_set_destructor(state, NULL);

	/* A failed copy may have copied something. */
	rushes_changed_fsp(state->handle, state->dest_fsp,
			   state->dest_off, state->to_copy);
	if (tevent_req_nterror(req, status)) {
		return;
	}
	tevent_req_done(req);
}

static NTSTATUS vfs_rushes_offload_write_recv(struct vfs_handle_struct *handle,
					      struct tevent_req *req,
					      off_t *copied)
{
	struct rushes_offload_write_state *state = tevent_req_data(
		req, struct rushes_offload_write_state);
	NTSTATUS status;

	if (tevent_req_is_nterror(req, &status)) {
		*copied = 0;
		tevent_req_received(req);
		return status;
	}
	*copied = state->copied;
	tevent_req_received(req);
	return NT_STATUS_OK;
}

/*
 * Names. The daemon holds files open: one that has lost its last name would
 * keep its space.
 */

static int vfs_rushes_unlinkat(struct vfs_handle_struct *handle,
			       struct files_struct *dirfsp,
			       const struct smb_filename *smb_fname,
			       int flags)
{
	SMB_STRUCT_STAT st = {0};
	bool matters = false;
	int ret;

	if ((flags & AT_REMOVEDIR) == 0) {
		matters = rushes_name_matters(handle, dirfsp, smb_fname, &st);
	}
	ret = SMB_VFS_NEXT_UNLINKAT(handle, dirfsp, smb_fname, flags);
	if (ret == 0 && matters) {
		rushes_gone_inode(handle, &st);
	}
	return ret;
}

static int vfs_rushes_renameat(struct vfs_handle_struct *handle,
			       struct files_struct *srcfsp,
			       const struct smb_filename *smb_fname_src,
			       struct files_struct *dstfsp,
			       const struct smb_filename *smb_fname_dst
			       RUSHES_RENAME_ARGS)
{
	SMB_STRUCT_STAT st = {0};
	bool matters;
	int ret;

	/* The file moved keeps its bytes; whose name it takes is lost. */
	matters = rushes_name_matters(handle, dstfsp, smb_fname_dst, &st);
	ret = SMB_VFS_NEXT_RENAMEAT(handle, srcfsp, smb_fname_src,
				    dstfsp, smb_fname_dst RUSHES_RENAME_PASS);
	if (ret == 0 && matters) {
		rushes_gone_inode(handle, &st);
	}
	return ret;
}

/*
 * "kernel oplocks = yes". A lease on our descriptor is broken by every other
 * open of the file, and the daemon's is one: while smbd holds a lease it reads
 * by itself. (A descriptor that the daemon already has may keep smbd from
 * getting the lease; then the client simply gets no oplock.)
 */
static int vfs_rushes_linux_setlease(struct vfs_handle_struct *handle,
				     struct files_struct *fsp,
				     int leasetype)
{
	struct rushes_fsp *file = NULL;
	int ret;

	if (rushes_session_of(handle) != NULL) {
		file = rushes_fsp_get(handle, fsp);
	}
	if (file != NULL && leasetype != F_UNLCK) {
		if (rushes_pread_first_of(file->session, file) == NULL) {
			rushes_fsp_unname(file);
		}
		file->is_leased = true;
	}
	ret = SMB_VFS_NEXT_LINUX_SETLEASE(handle, fsp, leasetype);
	if (file != NULL) {
		file->is_leased = (ret == 0 && leasetype != F_UNLCK);
	}
	return ret;
}

/*
 * doors/smb/vfs-table.txt says of every other entry why it is not here; a test
 * holds both to the headers.
 */
static struct vfs_fn_pointers vfs_rushes_fns = {
	.connect_fn = vfs_rushes_connect,
	.disconnect_fn = vfs_rushes_disconnect,

	.openat_fn = vfs_rushes_openat,
	.close_fn = vfs_rushes_close,
	.pread_fn = vfs_rushes_pread,
	.pread_send_fn = vfs_rushes_pread_send,
	.pread_recv_fn = vfs_rushes_pread_recv,
	.pwrite_fn = vfs_rushes_pwrite,
	.pwrite_send_fn = vfs_rushes_pwrite_send,
	.pwrite_recv_fn = vfs_rushes_pwrite_recv,
	.sendfile_fn = vfs_rushes_sendfile,
	.recvfile_fn = vfs_rushes_recvfile,
	.renameat_fn = vfs_rushes_renameat,
	.unlinkat_fn = vfs_rushes_unlinkat,
	.ftruncate_fn = vfs_rushes_ftruncate,
	.fallocate_fn = vfs_rushes_fallocate,
	.linux_setlease_fn = vfs_rushes_linux_setlease,
	.offload_write_send_fn = vfs_rushes_offload_write_send,
	.offload_write_recv_fn = vfs_rushes_offload_write_recv,
};

NTSTATUS samba_init_module(TALLOC_CTX *ctx)
{
	NTSTATUS status;

	status = smb_register_vfs(SMB_VFS_INTERFACE_VERSION, "rushes",
				  &vfs_rushes_fns);
	if (!NT_STATUS_IS_OK(status)) {
		return status;
	}

	vfs_rushes_debug_level = debug_add_class("rushes");
	if (vfs_rushes_debug_level == -1) {
		vfs_rushes_debug_level = DBGC_VFS;
	}
	return NT_STATUS_OK;
}
