/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Samba's door to Rushes: reads come out of the daemon's cache, and the daemon
 * gets a report of every change of a file before the client gets its answer.
 *
 *   [media]
 *   path = /srv/media
 *   vfs objects = rushes
 *   rushes:socket = /run/rushes/session.sock
 *   rushes:share = media
 *
 * Put it last in "vfs objects": it replaces vfs_default's I/O on real
 * descriptors, the modules before it translate names and streams.
 *
 * It decides nothing: the daemon chooses which file is cached, read ahead,
 * refused, or taken into the write buffer. It keeps no data: these lie in a
 * lane, which outlives smbd and the daemon. I/O on smbd's own descriptor is
 * right as long as the table of facts has no fact of the file; otherwise the
 * daemon, or its successor, first writes the file's bytes; see rushes_write.c.
 * See engine/shm for the client library; smbd's main thread makes all calls to
 * it.
 *
 * One tree connect is one session with the daemon; see rushes_session.c. The
 * daemon gets a file's name at its first read; see rushes_fsp.c.
 */

#include "includes.h"
#include "system/filesys.h"
#include "system/network.h"
#include "smbd/smbd.h"
#include "smbd/globals.h"
#include "lib/util/iov_buf.h"
#include "lib/util/sys_rw.h"
#include "lib/util/tevent_ntstatus.h"
#include "lib/util/tevent_unix.h"
#include "lib/tsocket/tsocket.h"
#include "version.h"
#include "vfs_rushes_compat.h"
#include "rushes_door.h"

/* "rushes check" compares this with the installed smbd. */
__attribute__((used)) static const char vfs_rushes_built_for[] =
	"rushes built for Samba " SAMBA_VERSION_STRING;

int vfs_rushes_debug_level = DBGC_VFS;

#define RUSHES_SOCKET_DEFAULT "/run/rushes/session.sock"
#define RUSHES_RECOVER_DEFAULT "rushes recover"

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

	/* No media there; smbd's own connections have no client. */
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
	session->recover_command = talloc_strdup(
		session, lp_parm_const_string(snum, "rushes", "recover",
					      RUSHES_RECOVER_DEFAULT));
	session->recover_ns = RUSHES_NS_PER_S *
		(uint64_t)MAX(lp_parm_int(snum, "rushes", "recover after",
					  RUSHES_RECOVER_S), 0);
	session->hung_ns = RUSHES_NS_PER_S *
		(uint64_t)MAX(lp_parm_int(snum, "rushes", "hung after",
					  RUSHES_HUNG_S), 0);
	address = tsocket_address_inet_addr_string(
		conn->sconn->remote_address, session);
	session->address = (address != NULL) ? address : "";
	if (session->socket_path == NULL || session->share == NULL ||
	    session->user == NULL || session->recover_command == NULL)
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
		rushes_session_disconnect(session);
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

/* Like rushes_read, but waits. RUSHES_PLAIN also for the daemon's errors. */
static ssize_t rushes_read_wait(struct rushes_fsp *file, void *data,
				size_t n, off_t offset)
{
	struct rushes_session *session = file->session;
	ssize_t ret;

	ret = rushes_read(file->file, data, n, offset);
	if (rushes_is_plain(ret)) {
		rushes_fsp_declined(file);
		ret = RUSHES_PLAIN;
	} else {
		file->was_served = true;
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
		if (!rushes_settle_fsp(handle, fsp)) {
			return -1;
		}
		return SMB_VFS_NEXT_PREAD(handle, fsp, data, n, offset);
	}
	if (ret < 0) {
		errno = -ret;
		return -1;
	}
	return ret;
}

struct rushes_pread_state {
	struct rushes_request read;
	struct tevent_req *req;
	struct tevent_context *ev;
	struct vfs_handle_struct *handle;
	struct files_struct *fsp;
	void *data;
	size_t n;
	off_t offset;
	ssize_t ret;
	struct vfs_aio_state vfs_aio_state;
};

static void rushes_pread_plain_done(struct tevent_req *subreq);

static int rushes_pread_state_destructor(struct rushes_pread_state *state)
{
	/*
	 * The client is gone: the request is freed, and its buffer with it.
	 * Only the library writes to the buffer, in rushes_poll: once the read
	 * is forgotten, nothing uses the buffer.
	 */
	rushes_request_forget(&state->read);
	return 0;
}

/* From smbd's own descriptor. */
static void rushes_pread_plain(struct rushes_pread_state *state)
{
	struct tevent_req *subreq = NULL;

	if (!rushes_settle_fsp(state->handle, state->fsp)) {
		tevent_req_error(state->req, errno);
		return;
	}
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

static void rushes_pread_deferred(struct rushes_request *read)
{
	rushes_pread_plain(talloc_get_type_abort(read,
						 struct rushes_pread_state));
}

/*
 * The daemon's answer, or RUSHES_PLAIN because it is gone. Callbacks of the
 * request are deferred to the event loop.
 */
static void rushes_pread_done(struct rushes_request *read, ssize_t result)
{
	struct rushes_pread_state *state = talloc_get_type_abort(
		read, struct rushes_pread_state);
	struct timespec end_time = {0};

	talloc_set_destructor(state, NULL);
	if (result == RUSHES_ABANDONED) {
		tevent_req_error(state->req, EBADF);
		return;
	}
	if (rushes_is_plain(result)) {
		rushes_fsp_declined(read->file);
		if (!rushes_request_defer(read, state->ev)) {
			tevent_req_oom(state->req);
		}
		return;
	}
	if (result < 0) {
		tevent_req_error(state->req, -result);
		return;
	}

	read->file->was_served = true;

	/* Short only at the end of the file */
	state->ret = result;
	clock_gettime_mono(&end_time);
	state->vfs_aio_state.duration = nsec_time_diff(&end_time,
						       &read->start_time);
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
	if (file == NULL &&
	    !rushes_session_is_lost(rushes_session_of(handle)) &&
	    rushes_settle_fsp(handle, fsp))
	{
		/* Without a request of our own; see vfs_rushes_pread_recv. */
		return SMB_VFS_NEXT_PREAD_SEND(mem_ctx, ev, handle, fsp,
					       data, n, offset);
	}

	req = tevent_req_create(mem_ctx, &state, struct rushes_pread_state);
	if (req == NULL) {
		return NULL;
	}
	*state = (struct rushes_pread_state) {
		.read = {
			.session = rushes_session_of(handle),
			.file = file,
			.done_fn = rushes_pread_done,
			.plain_fn = rushes_pread_deferred,
		},
		.req = req,
		.ev = ev,
		.handle = handle,
		.fsp = fsp,
		.data = data,
		.n = n,
		.offset = offset,
	};
	if (file != NULL && rushes_read_start(&state->read, data, n, offset)) {
		talloc_set_destructor(state, rushes_pread_state_destructor);
	} else {
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
		/* The request of the module below, returned as it was. */
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
 * Sending a file's bytes to the client's socket. The kernel copies them instead
 * of taking the pages: a page of the cache is reused as soon as it is unpinned,
 * and the network may have to send it again long after that.
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
 * Send all of it. 1: done; 0: the client stalled (*iov and *iov_count have the
 * rest; only with timeout_ms >= 0); -1: error.
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

/* Copy the rest of a lease, release the lease, and send the copy. */
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
 * The daemon died in the middle of an answer whose length the client knows
 * already: the rest from smbd's own descriptor. Bytes sent, short at the end of
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

	if (!rushes_settle_fsp(handle, fsp)) {
		return -1;
	}
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
 * Bytes sent in all, short at the end of the file; -1 on error.
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
 * end of the file (the caller then fills up with zeros); 0 if nothing at all
 * was sent (the caller then reads and writes); -1 ends the connection, except
 * for ENOSYS, ENOTSUP and EINTR, to which the caller reacts and which must not
 * come from here.
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
		/* Errors too: sendfile itself may get the disk's error. */
		if (file != NULL) {
			rushes_session_after_wait(file->session);
		}
		if (!rushes_settle_fsp(handle, fromfsp)) {
			return -1;
		}
		return SMB_VFS_NEXT_SENDFILE(handle, tofd, fromfsp, header,
					     offset, n);
	}
	file->was_served = true;
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

	if (!rushes_hold_fsp(handle, tofsp)) {
		return -1;
	}
	ret = SMB_VFS_NEXT_RECVFILE(handle, fromfd, tofsp, offset, n);
	rushes_changed_fsp(handle, tofsp, offset,
			   rushes_changed_length(n, ret));
	return ret;
}

static ssize_t vfs_rushes_pwrite(struct vfs_handle_struct *handle,
				 struct files_struct *fsp,
				 const void *data, size_t n, off_t offset)
{
	struct rushes_fsp *file = NULL;
	ssize_t ret = RUSHES_PLAIN;

	if (n > 0 && offset >= 0) {
		file = rushes_fsp_for_write(handle, fsp);
	}
	if (file != NULL) {
		ret = rushes_write(file->file, data, n, offset);
		if (rushes_write_is_plain(ret)) {
			ret = RUSHES_PLAIN;
		}
		rushes_session_after_wait(file->session);
	}
	if (ret == RUSHES_PLAIN) {
		if (!rushes_hold_fsp(handle, fsp)) {
			return -1;
		}
		ret = SMB_VFS_NEXT_PWRITE(handle, fsp, data, n, offset);
		rushes_changed_fsp(handle, fsp, offset,
				   rushes_changed_length(n, ret));
		return ret;
	}
	if (ret < 0) {
		errno = -ret;
		return -1;
	}
	return ret;
}

struct rushes_pwrite_state {
	struct rushes_request write;
	struct tevent_req *req;
	struct tevent_context *ev;
	struct vfs_handle_struct *handle;
	struct files_struct *fsp;
	const void *data;
	off_t offset;
	size_t n;
	ssize_t ret;
	struct vfs_aio_state vfs_aio_state;
};

static void rushes_pwrite_plain_done(struct tevent_req *subreq);

/* The request is freed, and its buffer with it: the client is gone. */
static int rushes_pwrite_state_destructor(struct rushes_pwrite_state *state)
{
	rushes_request_forget(&state->write);
	return 0;
}

static int rushes_pwrite_plain_destructor(struct rushes_pwrite_state *state)
{
	rushes_changed_orphan(state->handle, state->fsp,
			      state->offset, UINT64_MAX);
	return 0;
}

/*
 * Writes without returning to the event loop: no daemon starts before this
 * write has ended, and the loop may be waiting for a daemon.
 */
static void rushes_pwrite_alone(struct rushes_pwrite_state *state)
{
	state->ret = SMB_VFS_NEXT_PWRITE(state->handle, state->fsp, state->data,
					 state->n, state->offset);
	rushes_changed_fsp(state->handle, state->fsp, state->offset,
			   rushes_changed_length(state->n, state->ret));
	if (state->ret == -1) {
		tevent_req_error(state->req, errno);
		return;
	}
	tevent_req_done(state->req);
}

/*
 * To smbd's own descriptor. Reports the change also without a daemon: there may
 * be one when the write is done, and it may have read the old bytes.
 */
static void rushes_pwrite_plain(struct rushes_pwrite_state *state)
{
	struct rushes_session *session = state->write.session;
	struct tevent_req *subreq = NULL;

	if (!rushes_hold_fsp(state->handle, state->fsp)) {
		tevent_req_error(state->req, errno);
		return;
	}
	if (rushes_session_may_wait(session)) {
		rushes_pwrite_alone(state);
		return;
	}
	subreq = SMB_VFS_NEXT_PWRITE_SEND(state, state->ev, state->handle,
					  state->fsp, state->data, state->n,
					  state->offset);
	if (tevent_req_nomem(subreq, state->req)) {
		rushes_changed_fsp(state->handle, state->fsp, state->offset,
				   0);
		return;
	}
	tevent_req_set_callback(subreq, rushes_pwrite_plain_done, state->req);
	talloc_set_destructor(state, rushes_pwrite_plain_destructor);
}

static void rushes_pwrite_plain_done(struct tevent_req *subreq)
{
	struct tevent_req *req = tevent_req_callback_data(
		subreq, struct tevent_req);
	struct rushes_pwrite_state *state = tevent_req_data(
		req, struct rushes_pwrite_state);

	state->ret = SMB_VFS_PWRITE_RECV(subreq, &state->vfs_aio_state);
	TALLOC_FREE(subreq);
	talloc_set_destructor(state, NULL);
	rushes_changed_fsp(state->handle, state->fsp, state->offset,
			   rushes_changed_length(state->n, state->ret));
	if (state->ret == -1) {
		tevent_req_error(req, state->vfs_aio_state.error);
		return;
	}
	tevent_req_done(req);
}

static void rushes_pwrite_deferred(struct rushes_request *write)
{
	rushes_pwrite_plain(talloc_get_type_abort(write,
						  struct rushes_pwrite_state));
}

/* The daemon's answer, or RUSHES_PLAIN because it is gone. */
static void rushes_pwrite_done(struct rushes_request *write, ssize_t result)
{
	struct rushes_pwrite_state *state = talloc_get_type_abort(
		write, struct rushes_pwrite_state);
	struct timespec end_time = {0};

	talloc_set_destructor(state, NULL);
	if (result == RUSHES_ABANDONED) {
		tevent_req_error(state->req, EBADF);
		return;
	}
	if (rushes_write_is_plain(result)) {
		if (!rushes_request_defer(write, state->ev)) {
			tevent_req_oom(state->req);
		}
		return;
	}
	if (result < 0) {
		tevent_req_error(state->req, -result);
		return;
	}
	state->ret = result;
	clock_gettime_mono(&end_time);
	state->vfs_aio_state.duration = nsec_time_diff(&end_time,
						       &write->start_time);
	tevent_req_done(state->req);
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
	struct rushes_pwrite_state *state = NULL;
	struct rushes_fsp *file = NULL;

	if (rushes_session_of(handle) == NULL) {
		return SMB_VFS_NEXT_PWRITE_SEND(mem_ctx, ev, handle, fsp,
						data, n, offset);
	}
	if (n > 0 && offset >= 0) {
		file = rushes_fsp_for_write(handle, fsp);
	}

	req = tevent_req_create(mem_ctx, &state, struct rushes_pwrite_state);
	if (req == NULL) {
		return NULL;
	}
	*state = (struct rushes_pwrite_state) {
		.write = {
			.session = rushes_session_of(handle),
			.file = file,
			.done_fn = rushes_pwrite_done,
			.plain_fn = rushes_pwrite_deferred,
		},
		.req = req,
		.ev = ev,
		.handle = handle,
		.fsp = fsp,
		.data = data,
		.offset = offset,
		.n = n,
	};
	if (file != NULL &&
	    rushes_write_start(&state->write, data, n, offset))
	{
		talloc_set_destructor(state, rushes_pwrite_state_destructor);
	} else {
		rushes_pwrite_plain(state);
		if (!tevent_req_is_in_progress(req)) {
			return tevent_req_post(req, ev);
		}
	}
	tevent_req_defer_callback(req, ev);
	return req;
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
	bool is_known = false;
	off_t from = 0;
	int ret;

	/*
	 * Shorter: the bytes behind the new end change. Longer: those behind
	 * the old end. Of an unknown length: an overwrite of the whole.
	 */
	if (!rushes_hold_fsp(handle, fsp)) {
		return -1;
	}
	if (session != NULL && session->client != NULL &&
	    fstat(fsp_get_io_fd(fsp), &st) == 0)
	{
		from = MIN(st.st_size, length);
		is_known = true;
	}
	ret = SMB_VFS_NEXT_FTRUNCATE(handle, fsp, length);
	from = MAX(from, 0);
	/*
	 * A file that is cut within a page gets zeros behind its end, through
	 * the kernel's cache: they are bytes of it as soon as it grows again.
	 */
	if (is_known && (length >= st.st_size || length % RUSHES_PAGE == 0)) {
		rushes_resized_fsp(handle, fsp, from);
	} else {
		rushes_changed_fsp(handle, fsp, from, UINT64_MAX);
	}
	return ret;
}

static int vfs_rushes_fallocate(struct vfs_handle_struct *handle,
				struct files_struct *fsp,
				uint32_t mode,
				off_t offset,
				off_t len)
{
	int ret;

	if (!rushes_hold_fsp(handle, fsp)) {
		return -1;
	}
	ret = SMB_VFS_NEXT_FALLOCATE(handle, fsp, mode, offset, len);

	/*
	 * It may free blocks, and need not make the file longer. Where the file
	 * system cannot, the C library makes it longer by writing zeros.
	 */
	if (ret == 0 && mode == VFS_FALLOCATE_FL_KEEP_SIZE) {
		rushes_resized_fsp(handle, fsp, offset);
	} else {
		rushes_changed_fsp(handle, fsp, offset, UINT64_MAX);
	}
	return ret;
}

/*
 * Server-side copy. The bytes move between the descriptors themselves: source
 * and destination must have all of theirs.
 */

static struct tevent_req *vfs_rushes_offload_read_send(
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct vfs_handle_struct *handle,
	struct files_struct *fsp,
	uint32_t fsctl,
	uint32_t ttl,
	off_t offset,
	size_t to_copy)
{
	rushes_copy_source(handle, fsp);
	return SMB_VFS_NEXT_OFFLOAD_READ_SEND(mem_ctx, ev, handle, fsp, fsctl,
					      ttl, offset, to_copy);
}

struct rushes_offload_write_state {
	struct vfs_handle_struct *handle;
	off_t copied;
};

static void rushes_offload_write_done(struct tevent_req *subreq);

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
	};
	if (!rushes_settle_copy_sources() ||
	    !rushes_hold_fsp(handle, dest_fsp))
	{
		tevent_req_nterror(req, NT_STATUS_IO_DEVICE_ERROR);
		return tevent_req_post(req, ev);
	}
	subreq = SMB_VFS_NEXT_OFFLOAD_WRITE_SEND(handle, state, ev, fsctl,
						 token, transfer_offset,
						 dest_fsp, dest_off, to_copy);

	/*
	 * A copy on the descriptors themselves is done by now. One that goes on
	 * reads and writes through this module, by requests that each report
	 * their change; they may have to wait for a daemon, which must be able
	 * to start. No module of Samba works otherwise. A failed copy may have
	 * written something; and one that shares blocks instead of copying
	 * changes the file's blocks.
	 */
	rushes_changed_fsp(handle, dest_fsp, dest_off, UINT64_MAX);
	rushes_copied();
	if (tevent_req_nomem(subreq, req)) {
		return tevent_req_post(req, ev);
	}
	tevent_req_set_callback(subreq, rushes_offload_write_done, req);
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
 * Stable storage. The daemon writes the bytes that it has, and syncs them with
 * everything else of the file.
 */

struct rushes_fsync_state {
	struct rushes_request sync;
	struct tevent_req *req;
	struct tevent_context *ev;
	struct vfs_handle_struct *handle;
	struct files_struct *fsp;
	int ret;
	struct vfs_aio_state vfs_aio_state;
};

static void rushes_fsync_plain_done(struct tevent_req *subreq);

static int rushes_fsync_state_destructor(struct rushes_fsync_state *state)
{
	rushes_request_forget(&state->sync);
	return 0;
}

static void rushes_fsync_plain(struct rushes_fsync_state *state)
{
	struct tevent_req *subreq = NULL;

	if (!rushes_settle_fsp(state->handle, state->fsp)) {
		tevent_req_error(state->req, errno);
		return;
	}
	subreq = SMB_VFS_NEXT_FSYNC_SEND(state, state->ev, state->handle,
					 state->fsp);
	if (tevent_req_nomem(subreq, state->req)) {
		return;
	}
	if (state->sync.file != NULL) {
		/* The sync does not cover a change that ends from now on. */
		state->sync.file->owes_sync = false;
	}
	tevent_req_set_callback(subreq, rushes_fsync_plain_done, state->req);
}

static void rushes_fsync_plain_done(struct tevent_req *subreq)
{
	struct tevent_req *req = tevent_req_callback_data(
		subreq, struct tevent_req);
	struct rushes_fsync_state *state = tevent_req_data(
		req, struct rushes_fsync_state);

	state->ret = SMB_VFS_FSYNC_RECV(subreq, &state->vfs_aio_state);
	TALLOC_FREE(subreq);
	if (state->ret == -1) {
		tevent_req_error(req, state->vfs_aio_state.error);
		return;
	}
	tevent_req_done(req);
}

static void rushes_fsync_deferred(struct rushes_request *sync)
{
	rushes_fsync_plain(talloc_get_type_abort(sync,
						 struct rushes_fsync_state));
}

static void rushes_fsync_done(struct rushes_request *sync, ssize_t result)
{
	struct rushes_fsync_state *state = talloc_get_type_abort(
		sync, struct rushes_fsync_state);

	talloc_set_destructor(state, NULL);
	if (result == RUSHES_ABANDONED) {
		tevent_req_error(state->req, EBADF);
		return;
	}
	/*
	 * The daemon cannot write again the bytes that smbd wrote itself: the
	 * kernel reports errors of those to smbd's own descriptor.
	 */
	if (rushes_write_is_plain(result) ||
	    (result == 0 && sync->file->owes_sync)) {
		if (!rushes_request_defer(sync, state->ev)) {
			tevent_req_oom(state->req);
		}
		return;
	}
	if (result == 0) {
		tevent_req_done(state->req);
		return;
	}
	tevent_req_error(state->req, -result);
}

static struct tevent_req *vfs_rushes_fsync_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct files_struct *fsp)
{
	struct tevent_req *req = NULL;
	struct rushes_fsync_state *state = NULL;
	struct rushes_fsp *file = NULL;

	/*
	 * The module asks the daemon also when it has nothing in memory: the
	 * kernel reports a failed write to smbd's descriptor once, and from
	 * then on a sync succeeds.
	 */
	file = rushes_fsp_for_write(handle, fsp);
	if (file == NULL &&
	    !rushes_session_is_lost(rushes_session_of(handle)) &&
	    rushes_settle_fsp(handle, fsp))
	{
		return SMB_VFS_NEXT_FSYNC_SEND(mem_ctx, ev, handle, fsp);
	}
	req = tevent_req_create(mem_ctx, &state, struct rushes_fsync_state);
	if (req == NULL) {
		return NULL;
	}
	*state = (struct rushes_fsync_state) {
		.sync = {
			.session = rushes_session_of(handle),
			.file = file,
			.done_fn = rushes_fsync_done,
			.plain_fn = rushes_fsync_deferred,
		},
		.req = req,
		.ev = ev,
		.handle = handle,
		.fsp = fsp,
	};
	if (file != NULL && rushes_sync_start(&state->sync)) {
		talloc_set_destructor(state, rushes_fsync_state_destructor);
	} else {
		rushes_fsync_plain(state);
		if (!tevent_req_is_in_progress(req)) {
			return tevent_req_post(req, ev);
		}
	}
	tevent_req_defer_callback(req, ev);
	return req;
}

static int vfs_rushes_fsync_recv(struct tevent_req *req,
				 struct vfs_aio_state *vfs_aio_state)
{
	struct rushes_fsync_state *state = talloc_get_type(
		_tevent_req_data(req), struct rushes_fsync_state);

	if (state == NULL) {
		return SMB_VFS_FSYNC_RECV(req, vfs_aio_state);
	}
	if (tevent_req_is_unix_error(req, &vfs_aio_state->error)) {
		tevent_req_received(req);
		return -1;
	}
	*vfs_aio_state = state->vfs_aio_state;
	tevent_req_received(req);
	return 0;
}

/*
 * Attributes of a file.
 */

static int vfs_rushes_stat(struct vfs_handle_struct *handle,
			   struct smb_filename *smb_fname)
{
	int ret = SMB_VFS_NEXT_STAT(handle, smb_fname);

	if (ret == 0) {
		rushes_fix_stat(handle, &smb_fname->st, AT_FDCWD,
				smb_fname->base_name);
	}
	return ret;
}

static int vfs_rushes_lstat(struct vfs_handle_struct *handle,
			    struct smb_filename *smb_fname)
{
	int ret = SMB_VFS_NEXT_LSTAT(handle, smb_fname);

	if (ret == 0) {
		rushes_fix_stat(handle, &smb_fname->st, AT_FDCWD,
				smb_fname->base_name);
	}
	return ret;
}

static int vfs_rushes_fstat(struct vfs_handle_struct *handle,
			    struct files_struct *fsp, SMB_STRUCT_STAT *sbuf)
{
	int ret = SMB_VFS_NEXT_FSTAT(handle, fsp, sbuf);

	if (ret == 0) {
		rushes_fix_stat(handle, sbuf, fsp_get_pathref_fd(fsp), NULL);
	}
	return ret;
}

static int vfs_rushes_fstatat(struct vfs_handle_struct *handle,
			      const struct files_struct *dirfsp,
			      const struct smb_filename *smb_fname,
			      SMB_STRUCT_STAT *sbuf,
			      int flags)
{
	int ret = SMB_VFS_NEXT_FSTATAT(handle, dirfsp, smb_fname, sbuf, flags);

	if (ret == 0) {
		rushes_fix_stat(handle, sbuf, fsp_get_pathref_fd(dirfsp),
				smb_fname->base_name);
	}
	return ret;
}

static struct dirent *vfs_rushes_readdir(struct vfs_handle_struct *handle,
					 struct files_struct *dirfsp,
					 DIR *dirp
					 RUSHES_READDIR_ARGS)
{
	SMB_STRUCT_STAT *st = RUSHES_READDIR_STAT;
	struct dirent *entry = NULL;

	entry = smb_vfs_call_readdir(handle->next, dirfsp, dirp
				     RUSHES_READDIR_PASS);
	if (entry != NULL && st != NULL && VALID_STAT(*st)) {
		rushes_fix_stat(handle, st, fsp_get_pathref_fd(dirfsp),
				entry->d_name);
	}
	return entry;
}

/* The daemon sets a file's time when it has written all of it. */
static int vfs_rushes_fntimes(struct vfs_handle_struct *handle,
			      struct files_struct *fsp,
			      struct smb_file_time *ft)
{
	SMB_STRUCT_STAT *st = &fsp->fsp_name->st;

	if (S_ISREG(st->st_ex_mode) && !is_omit_timespec(&ft->mtime) &&
	    !rushes_time_inode(rushes_session_of(handle), st->st_ex_dev,
			       st->st_ex_ino, ft->mtime))
	{
		return -1;
	}
	return SMB_VFS_NEXT_FNTIMES(handle, fsp, ft);
}

/* The file shows data and holes correctly once it has all its bytes. */
static off_t vfs_rushes_lseek(struct vfs_handle_struct *handle,
			      struct files_struct *fsp,
			      off_t offset,
			      int whence)
{
	if (whence == SEEK_DATA || whence == SEEK_HOLE || whence == SEEK_END) {
		if (!rushes_settle_fsp(handle, fsp)) {
			return -1;
		}
	}
	return SMB_VFS_NEXT_LSEEK(handle, fsp, offset, whence);
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

	/* The moved file keeps its bytes; the one that it replaces is lost. */
	matters = rushes_name_matters(handle, dstfsp, smb_fname_dst, &st);
	ret = smb_vfs_call_renameat(handle->next, srcfsp, smb_fname_src,
				    dstfsp, smb_fname_dst RUSHES_RENAME_PASS);
	if (ret == 0 && matters) {
		rushes_gone_inode(handle, &st);
	}
	return ret;
}

/*
 * A client whose connection is lost may come back for its file, and gets it if
 * stat returns the same as now, ctime and blocks included. So the daemon first
 * does the work that would change them later: it writes its bytes and frees
 * reserved blocks.
 */
static NTSTATUS vfs_rushes_durable_disconnect(struct vfs_handle_struct *handle,
					      struct files_struct *fsp,
					      const DATA_BLOB old_cookie,
					      TALLOC_CTX *mem_ctx,
					      DATA_BLOB *new_cookie)
{
	struct rushes_fsp *file = NULL;

	if (rushes_session_of(handle) != NULL) {
		file = rushes_fsp_get(handle, fsp);
	}
	if (file != NULL && file->is_regular) {
		rushes_fsp_unname(file);
		if (rushes_hold_fsp(handle, fsp)) {
			rushes_changed_fsp(handle, fsp, 0, 0);
		}
	}
	return SMB_VFS_NEXT_DURABLE_DISCONNECT(handle, fsp, old_cookie,
					       mem_ctx, new_cookie);
}

/*
 * "kernel oplocks = yes". Every other open of the file breaks a lease on smbd's
 * descriptor, and the daemon's is one: while smbd holds a lease it reads by
 * itself. A descriptor that the daemon already has may keep smbd from getting
 * the lease; then the client simply gets no oplock.
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
		if (rushes_request_of(file) == NULL) {
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
 * doors/smb/vfs-table.txt gives the reason for every other entry that is not
 * here; a test compares both with the headers.
 */
static struct vfs_fn_pointers vfs_rushes_fns = {
	.connect_fn = vfs_rushes_connect,
	.disconnect_fn = vfs_rushes_disconnect,

	.readdir_fn = vfs_rushes_readdir,

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
	.lseek_fn = vfs_rushes_lseek,
	.fsync_send_fn = vfs_rushes_fsync_send,
	.fsync_recv_fn = vfs_rushes_fsync_recv,
	.stat_fn = vfs_rushes_stat,
	.lstat_fn = vfs_rushes_lstat,
	.fstat_fn = vfs_rushes_fstat,
	.fstatat_fn = vfs_rushes_fstatat,
	.fntimes_fn = vfs_rushes_fntimes,
	.renameat_fn = vfs_rushes_renameat,
	.unlinkat_fn = vfs_rushes_unlinkat,
	.ftruncate_fn = vfs_rushes_ftruncate,
	.fallocate_fn = vfs_rushes_fallocate,
	.linux_setlease_fn = vfs_rushes_linux_setlease,
	.durable_disconnect_fn = vfs_rushes_durable_disconnect,
	.offload_read_send_fn = vfs_rushes_offload_read_send,
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
