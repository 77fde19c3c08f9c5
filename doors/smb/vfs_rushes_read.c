/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Samba's entries that read a file: from the daemon's cache, or from smbd's own
 * descriptor when the daemon does not serve the file or is gone.
 */

#include "includes.h"
#include <poll.h>
#include "system/filesys.h"
#include "system/network.h"
#include "smbd/smbd.h"
#include "lib/util/iov_buf.h"
#include "lib/util/tevent_unix.h"
#include "rushes_door.h"
#include "vfs_rushes_entries.h"

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

ssize_t vfs_rushes_pread(struct vfs_handle_struct *handle,
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

struct tevent_req *vfs_rushes_pread_send(
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

ssize_t vfs_rushes_pread_recv(struct tevent_req *req,
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
ssize_t vfs_rushes_sendfile(struct vfs_handle_struct *handle,
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
