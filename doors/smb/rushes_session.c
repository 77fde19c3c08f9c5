/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * A session with the daemon: found, watched, lost and found again; and the
 * asynchronous requests that are under way in it.
 *
 * It is made as root, since the daemon accepts no other user; after that no
 * call needs a privilege, so that it does not matter as which user smbd runs in
 * a completion.
 */

#include "includes.h"
#include <malloc.h>
#include "system/filesys.h"
#include "system/wait.h"
#include "smbd/smbd.h"
#include "lib/util/dlinklist.h"
#include "rushes_door.h"

static const char RUSHES_GONE[] = "it went away";

uint64_t rushes_now_ns(void)
{
	struct timespec now = {0};

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * RUSHES_NS_PER_S + now.tv_nsec;
}

/* The daemon will not answer this request any more. */
static void rushes_request_settled(struct rushes_request *request)
{
	DLIST_REMOVE(request->session->requests, request);
	request->ticket = 0;
}

static void rushes_request_finish(struct rushes_request *request,
				  ssize_t result)
{
	rushes_request_settled(request);
	request->done_fn(request, result);
}

/*
 * Finish requests that the daemon has answered. Their callbacks are deferred to
 * the event loop: no foreign code runs in here.
 */
static void rushes_session_collect(struct rushes_session *session)
{
	struct rushes_completion done[16];
	int count = 0;
	int i;

	do {
		count = rushes_poll(session->client, done, ARRAY_SIZE(done));
		for (i = 0; i < count; i++) {
			rushes_request_finish(
				(struct rushes_request *)done[i].private_data,
				done[i].result);
		}
	} while (count == ARRAY_SIZE(done));
}

/* End the session; outstanding requests go on as plain I/O. */
static void rushes_session_end(struct rushes_session *session)
{
	rushes_session_collect(session);

	/* A hung daemon has left some. */
	while (session->requests != NULL) {
		rushes_request_cancel(session->client,
				      session->requests->ticket);
		rushes_request_finish(session->requests, RUSHES_PLAIN);
	}

	TALLOC_FREE(session->fdes[0]);
	TALLOC_FREE(session->fdes[1]);
	TALLOC_FREE(session->look);
	session->lost_ns = 0;
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

static void rushes_session_look_again(struct rushes_session *session);

/* The daemon is dead, or as good as dead. */
static void rushes_session_lost(struct rushes_session *session,
				const char *reason)
{
	if (session->lost_ns != 0) {
		return;
	}
	if (rushes_is_lost(session->client)) {
		/*
		 * It may have acknowledged bytes that files lack. Requests on
		 * those files wait in the library for another daemon.
		 */
		session->lost_ns = rushes_now_ns();
		session->recover_again_ns = 0;
		TALLOC_FREE(session->fdes[0]);
		TALLOC_FREE(session->fdes[1]);
		rushes_session_log_absence(session, reason);
		rushes_session_look_again(session);
		rushes_session_collect(session);
		return;
	}
	rushes_session_end(session);
	rushes_session_log_absence(session, reason);
	session->retry_ns = 0;
}

static void rushes_session_readable(struct tevent_context *ev,
				    struct tevent_fd *fde,
				    uint16_t flags,
				    void *private_data)
{
	struct rushes_session *session = talloc_get_type_abort(
		private_data, struct rushes_session);

	if (session->client == NULL || session->lost_ns != 0) {
		return;
	}
	rushes_session_collect(session);
	if (!rushes_alive(session->client)) {
		rushes_session_lost(session, RUSHES_GONE);
	}
}

/*
 * There is no daemon here, or it refuses this session: remember that for a
 * while.
 */
static void rushes_session_refused(struct rushes_session *session,
				   uint64_t retry_s,
				   const char *reason)
{
	session->retry_ns = rushes_now_ns() + retry_s * RUSHES_NS_PER_S;
	session->refused = session->asked;
	rushes_session_log_absence(session, reason);
}

/*
 * On a disk with contracts a read without a contract may take long: a daemon
 * that works on it has a heartbeat.
 */
static bool rushes_session_is_hung(struct rushes_session *session)
{
	uint32_t heartbeat = rushes_heartbeat(session->client);
	bool beats = heartbeat != session->heartbeat;
	struct timespec now = {0};
	int64_t waited_ns;

	session->heartbeat = heartbeat;
	clock_gettime_mono(&now);
	waited_ns = nsec_time_diff(&now, &session->requests->start_time);
	return waited_ns > (beats ? RUSHES_LOST_S * (int64_t)RUSHES_NS_PER_S
				  : (int64_t)session->hung_ns);
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
	if (session->requests == NULL || session->lost_ns != 0) {
		return;
	}
	if (rushes_session_is_hung(session)) {
		rushes_lose(session->client);
		rushes_session_lost(session, "it is hung");
		if (session->client == NULL) {
			rushes_session_refused(session, RUSHES_HUNG_S,
					       "it is hung");
		}
		return;
	}
	rushes_session_guard(session);
}

/*
 * A dead daemon closes its socket, which wakes this process; a hung one does
 * nothing. One timer for all requests, made again only every few seconds: no
 * cost per request.
 */
static void rushes_session_guard(struct rushes_session *session)
{
	if (session->guard != NULL) {
		return;
	}
	session->guard = tevent_add_timer(
		session->ev, session,
		tevent_timeval_current_ofs(
			MIN(RUSHES_GUARD_S,
			    session->hung_ns / RUSHES_NS_PER_S + 1), 0),
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

/*
 * smbd allocates a buffer for every read and frees it with the answer. Clients
 * keep two reads of 8 MiB under way; glibc gives such buffers back to the
 * kernel each time, and the kernel zeroes new ones page by page: a tenth of the
 * CPU time of a read from the cache. This lets a process keep as much as four
 * of them.
 */
static void rushes_keep_buffers(void)
{
	static bool done = false;

	if (done) {
		return;
	}
	done = true;
	mallopt(M_MMAP_THRESHOLD, RUSHES_KEEP_BYTES);
	mallopt(M_TRIM_THRESHOLD, RUSHES_KEEP_BYTES);
}

/* As root: opens the facts, as a daemon may have begun to publish them. */
static void rushes_session_learn(struct rushes_session *session)
{
	struct rushes_facts *facts = NULL;

	/* Closing the old facts would drop their lock. */
	if (session->facts != NULL && session->plain_count > 0) {
		return;
	}
	facts = rushes_facts_open(session->socket_path);
	if (facts != NULL) {
		rushes_facts_close(session->facts);
		session->facts = facts;
		session->facts_look_ns = 0;
	}
}

/* Before the attempt: afterwards the file may be another daemon's. */
static void rushes_session_note_socket(struct rushes_session *session)
{
	if (stat(session->socket_path, &session->asked) == -1) {
		session->asked = (struct stat) {0};
	}
}

/* There is a session: does it have its facts and its event handlers? */
static bool rushes_session_is_whole(struct rushes_session *session)
{
	if ((session->facts != NULL || !rushes_takes_writes(session->client)) &&
	    rushes_session_watch(session))
	{
		session->absence_logged = false;
		session->is_silent = false;
		session->missed_ns = 0;
		session->recover_again_ns = 0;
		return true;
	}
	rushes_session_end(session);
	rushes_session_refused(session, RUSHES_RETRY_S, "out of memory");
	return false;
}

static void rushes_session_try(struct rushes_session *session,
			       uint32_t patience_ms)
{
	const char *reason = NULL;
	uint64_t started_ns = rushes_now_ns();
	uint64_t spent_ns;

	/* The daemon asks the socket for the peer: uid 0 or it refuses. */
	become_root();
	rushes_session_note_socket(session);
	session->client = rushes_connect(session->socket_path,
					 RUSHES_DOOR_SMB,
					 session->share,
					 session->user,
					 session->address,
					 patience_ms,
					 &reason);
	session->is_silent = session->client == NULL && errno == ETIMEDOUT;
	session->is_refused = session->client == NULL && errno == EACCES;
	rushes_session_learn(session);
	spent_ns = rushes_now_ns() - started_ns;
	if (session->client == NULL) {
		rushes_session_refused(
			session,
			MIN(RUSHES_RETRY_S + spent_ns * RUSHES_RETRY_SHARE /
						     RUSHES_NS_PER_S,
			    RUSHES_RETRY_S_MAX),
			reason);
	}
	unbecome_root();

	if (session->client == NULL || !rushes_session_is_whole(session)) {
		return;
	}
	rushes_keep_buffers();
	DBG_NOTICE("share %s: session with the daemon at %s\n",
		   session->share, session->socket_path);
}

void rushes_session_connect(struct rushes_session *session)
{
	rushes_session_try(session, RUSHES_CONNECT_MS);
}

/* Start the command that writes the bytes left; of all that run one does it. */
static void rushes_session_recover(struct rushes_session *session,
				   uint64_t since_ns)
{
	char *runtime_dir = NULL;
	char *slash = NULL;
	uint64_t now_ns = rushes_now_ns();
	pid_t pid;

	if (now_ns < since_ns + session->recover_ns ||
	    now_ns < session->recover_again_ns)
	{
		return;
	}
	DBG_ERR("share %s: %s; starting \"%s\"\n", session->share,
		session->recover_again_ns == 0
			? "no daemon has started"
			: "the last daemon's data is not written yet",
		session->recover_command);
	session->recover_wait_s =
		session->recover_again_ns == 0
			? RUSHES_RECOVER_AGAIN_S
			: MIN(2 * session->recover_wait_s,
			      RUSHES_RECOVER_AGAIN_S_MAX);
	session->recover_again_ns =
		now_ns + session->recover_wait_s * RUSHES_NS_PER_S;
	/* It works for the runtime folder that holds the daemon's sockets. */
	runtime_dir = talloc_strdup(talloc_tos(), session->socket_path);
	slash = runtime_dir == NULL ? NULL : strrchr(runtime_dir, '/');
	become_root();
	pid = fork();
	if (pid == 0) {
		if (slash != NULL) {
			*slash = '\0';
			setenv("RUSHES_RUNTIME_DIR", runtime_dir, 1);
		}
		/* Twice, so that smbd gets no child that it does not know. */
		if (fork() != 0) {
			_exit(0);
		}
		setsid();
		closefrom(3);
		execl("/bin/sh", "sh", "-c", session->recover_command,
		      (char *)NULL);
		_exit(127);
	}
	while (pid > 0 && waitpid(pid, NULL, 0) == -1 && errno == EINTR) {
		continue;
	}
	unbecome_root();
	TALLOC_FREE(runtime_dir);
}

/* Is there another daemon, or are the lost one's bytes written? */
static bool rushes_session_look_for(struct rushes_session *session,
				    uint32_t patience_ms)
{
	bool found;

	become_root();
	rushes_session_note_socket(session);
	found = rushes_reconnect(session->client, patience_ms);
	session->is_silent = !found && errno == ETIMEDOUT;
	if (session->is_silent) {
		/* A hung daemon costs its full patience each time. */
		session->look_ns = rushes_now_ns() + RUSHES_NS_PER_S / 2;
	}
	rushes_session_learn(session);
	unbecome_root();
	if (found) {
		session->lost_ns = 0;
		if (!rushes_session_is_whole(session)) {
			return true;
		}
		DBG_ERR("share %s: a daemon has started\n", session->share);
		rushes_session_collect(session);
		return true;
	}
	if (rushes_is_recovered(session->client)) {
		session->lost_ns = 0;
		rushes_give_up(session->client);
		rushes_session_end(session);
		session->retry_ns = 0;
		return true;
	}
	rushes_session_recover(session, session->lost_ns);
	return false;
}

static bool rushes_session_look(struct rushes_session *session)
{
	if (session->lost_ns == 0) {
		return true;
	}
	if (rushes_now_ns() < session->look_ns) {
		return false;
	}
	return rushes_session_look_for(session, session->requests != NULL
							? RUSHES_AWAITED_MS
							: RUSHES_CONNECT_MS);
}

static void rushes_session_looked(struct tevent_context *ev,
				  struct tevent_timer *te,
				  struct timeval now,
				  void *private_data)
{
	struct rushes_session *session = talloc_get_type_abort(
		private_data, struct rushes_session);

	/* tevent frees a timer that has fired. */
	session->look = NULL;
	if (!rushes_session_look(session)) {
		rushes_session_look_again(session);
	}
}

static void rushes_session_look_again(struct rushes_session *session)
{
	if (session->look == NULL) {
		session->look = tevent_add_timer(
			session->ev, session,
			tevent_timeval_current_ofs(0, RUSHES_LOOK_MS * 1000),
			rushes_session_looked, session);
	}
}

bool rushes_session_has_daemon(const struct rushes_session *session)
{
	return session->client != NULL && session->lost_ns == 0;
}

void rushes_session_seek(struct rushes_session *session)
{
	if (session->lost_ns != 0) {
		rushes_session_look(session);
		return;
	}
	if (session->client == NULL) {
		rushes_session_connect(session);
	}
	if (session->client == NULL) {
		if (session->missed_ns == 0) {
			session->missed_ns = rushes_now_ns();
		}
		rushes_session_recover(session, session->missed_ns);
	}
}

bool rushes_session_may_wait(struct rushes_session *session)
{
	uint64_t now_ns = rushes_now_ns();

	if (rushes_session_has_daemon(session) || session->facts == NULL) {
		return false;
	}
	if (session->lost_ns != 0) {
		return true;
	}
	if (now_ns >= session->facts_look_ns) {
		session->facts_look_ns = now_ns + RUSHES_RETRY_NS;
		session->has_facts = rushes_has_facts(session->facts);
	}
	return session->has_facts && !session->is_refused;
}

bool rushes_session_is_lost(const struct rushes_session *session)
{
	return session != NULL && session->lost_ns != 0;
}

/*
 * Is there a socket file that differs from this one? A stat of a file that
 * mostly does not exist takes less than a microsecond.
 */
static bool rushes_socket_is_new(struct rushes_session *session,
				 const struct stat *known)
{
	struct stat st = {0};

	if (stat(session->socket_path, &st) == -1) {
		return false;
	}

	/* An inode number may be used again at once: compare the times. */
	return st.st_dev != known->st_dev ||
	       st.st_ino != known->st_ino ||
	       st.st_ctim.tv_sec != known->st_ctim.tv_sec ||
	       st.st_ctim.tv_nsec != known->st_ctim.tv_nsec;
}

void rushes_session_refresh(struct rushes_session *session)
{
	if (session->lost_ns != 0) {
		rushes_session_look(session);
		return;
	}
	if (session->client != NULL && !rushes_alive(session->client)) {
		rushes_session_lost(session, RUSHES_GONE);
		if (session->lost_ns != 0) {
			rushes_session_look(session);
			return;
		}
	}
	if (session->client == NULL &&
	    rushes_socket_is_new(session, &session->refused))
	{
		rushes_session_connect(session);
	}
}

struct rushes_client *rushes_session_for_read(struct rushes_session *session)
{
	rushes_session_refresh(session);
	if (session->client == NULL && rushes_now_ns() >= session->retry_ns) {
		rushes_session_connect(session);
	}
	return session->client;
}

static void rushes_session_ask(struct rushes_session *session,
			       uint32_t patience_ms)
{
	if (session->lost_ns != 0) {
		rushes_session_look_for(session, patience_ms);
	} else {
		rushes_session_try(session, patience_ms);
	}
}

/* A daemon that did not react for so long notices that itself. */
static bool rushes_session_is_deaf(struct rushes_session *session)
{
	return session->is_silent && rushes_now_ns() < session->patient_ns &&
	       !rushes_socket_is_new(session, &session->deaf);
}

struct rushes_client *rushes_session_for_write(struct rushes_session *session)
{
	rushes_session_for_read(session);
	if (!rushes_session_has_daemon(session) && session->is_silent &&
	    !rushes_session_is_deaf(session))
	{
		/*
		 * A daemon runs, and other smbds may read through it: do not
		 * change the file behind its back yet.
		 */
		rushes_session_ask(session, RUSHES_SILENT_MS);
		if (session->is_silent) {
			session->patient_ns = rushes_now_ns() +
					      RUSHES_RETRY_S_MAX *
					      RUSHES_NS_PER_S;
			session->deaf = session->asked;
		}
	}
	return rushes_session_has_daemon(session) ? session->client : NULL;
}

bool rushes_session_is_alone(struct rushes_session *session)
{
	/* A daemon that did not react may do so again, and serve others. */
	bool may_answer = session->lost_ns != 0 || session->is_silent ||
			  rushes_socket_is_new(session, &session->refused);

	if (!rushes_session_has_daemon(session) && may_answer) {
		rushes_session_ask(session, RUSHES_CONNECT_MS);
	}
	return !rushes_session_has_daemon(session) &&
	       (!session->is_silent || rushes_session_is_deaf(session));
}

void rushes_session_after_wait(struct rushes_session *session)
{
	if (session->client == NULL || session->lost_ns != 0) {
		return;
	}
	if (session->requests != NULL) {
		rushes_session_collect(session);
	}
	if (!rushes_alive(session->client)) {
		rushes_session_lost(session, RUSHES_GONE);
	}
}

void rushes_session_disconnect(struct rushes_session *session)
{
	/*
	 * smbd has closed all files. If a request is still under way, it ends
	 * here: its buffer and its conn go away.
	 */
	while (session->requests != NULL) {
		struct rushes_request *request = session->requests;

		rushes_request_forget(request);
		request->done_fn(request, RUSHES_ABANDONED);
	}
	if (session->client != NULL) {
		rushes_session_end(session);
	}
	rushes_facts_close(session->facts);
	session->facts = NULL;
	session->plain_count = 0;
}

/* Has the daemon taken the request? */
static bool rushes_started(struct rushes_request *request)
{
	struct rushes_session *session = request->session;

	if (request->ticket == 0) {
		return false;
	}
	DLIST_ADD_END(session->requests, request);
	rushes_session_guard(session);
	return true;
}

bool rushes_read_start(struct rushes_request *request, void *data, size_t n,
		       off_t offset)
{
	clock_gettime_mono(&request->start_time);
	request->ticket = rushes_read_send(request->file->file, data, n,
					   offset, request);
	return rushes_started(request);
}

bool rushes_write_start(struct rushes_request *request, const void *data,
			size_t n, off_t offset)
{
	clock_gettime_mono(&request->start_time);
	request->ticket = rushes_write_send(request->file->file, data, n,
					    offset, request);
	return rushes_started(request);
}

bool rushes_sync_start(struct rushes_request *request)
{
	clock_gettime_mono(&request->start_time);
	request->ticket = rushes_sync_send(request->file->file, request);
	return rushes_started(request);
}

static void rushes_request_deferred(struct tevent_context *ev,
				    struct tevent_immediate *im,
				    void *private_data)
{
	struct rushes_request *request = (struct rushes_request *)private_data;

	TALLOC_FREE(im);
	request->plain_fn(request);
}

bool rushes_request_defer(struct rushes_request *request,
			  struct tevent_context *ev)
{
	struct tevent_immediate *im = tevent_create_immediate(request);

	if (im == NULL) {
		return false;
	}
	tevent_schedule_immediate(im, ev, rushes_request_deferred, request);
	return true;
}

void rushes_request_forget(struct rushes_request *request)
{
	rushes_request_cancel(request->session->client, request->ticket);
	rushes_request_settled(request);
}

struct rushes_request *rushes_request_of(const struct rushes_fsp *file)
{
	struct rushes_request *request = NULL;

	for (request = file->session->requests; request != NULL;
	     request = request->next)
	{
		if (request->file == file) {
			break;
		}
	}
	return request;
}
