/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Samba's entries that change a file's bytes or its length, copy them on the
 * server, or put them on stable storage: through the daemon's write buffer, or
 * on smbd's own descriptor. rushes_write.c says which, and tells the daemon.
 */

#include "includes.h"
#include "system/filesys.h"
#include "smbd/smbd.h"
#include "lib/util/tevent_ntstatus.h"
#include "lib/util/tevent_unix.h"
#include "rushes_door.h"
#include "vfs_rushes_entries.h"

ssize_t vfs_rushes_recvfile(struct vfs_handle_struct *handle,
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

ssize_t vfs_rushes_pwrite(struct vfs_handle_struct *handle,
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

struct tevent_req *vfs_rushes_pwrite_send(
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

ssize_t vfs_rushes_pwrite_recv(struct tevent_req *req,
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

int vfs_rushes_ftruncate(struct vfs_handle_struct *handle,
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

int vfs_rushes_fallocate(struct vfs_handle_struct *handle,
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

struct tevent_req *vfs_rushes_offload_read_send(
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

struct tevent_req *vfs_rushes_offload_write_send(
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

NTSTATUS vfs_rushes_offload_write_recv(struct vfs_handle_struct *handle,
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

struct tevent_req *vfs_rushes_fsync_send(
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

int vfs_rushes_fsync_recv(struct tevent_req *req,
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
