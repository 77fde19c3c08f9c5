/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * A client library that does everything rushes_client.h allows, as nastily as
 * it may. Test modules link it in place of engine/shm.
 *
 * There is no daemon: it answers reads from the file, through a cache in this
 * process that drops a block only when some smbd has reported a change. So a
 * change that the module does not report shows as old bytes. Answers come late,
 * in any order, or not at all ("read it yourself").
 *
 * The "daemon" is the file at socket_path: if that differs from the one at
 * connect, the daemon has died (and, if there is a file, has a successor). The
 * counters of changes, which all smbds share, lie beside it in PATH.changes.
 *
 * A forbidden call ends the process by abort(): smbd then leaves a panic that
 * the test finds.
 *
 * Not for measurements, and not thread-safe, like the real one.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "rushes_client.h"

#define BLOCK_BYTES 65536
#define BLOCK_COUNT 256
#define COUNTER_COUNT (1 << 20)
#define BLOCKS_MAX (1 << 15)
#define MUST(x) \
	do { \
		if (!(x)) { \
			fprintf(stderr, "chaos_client: %s: %s\n", \
				__func__, #x); \
			abort(); \
		} \
	} while (0)

/* Each change increments two: one by block, one by inode (its size). */
struct changes {
	_Atomic uint32_t of_block[COUNTER_COUNT];
	_Atomic uint32_t of_inode[COUNTER_COUNT];
};

struct block {
	struct statx_timestamp born;
	dev_t device;
	ino_t inode;
	uint64_t index;
	uint32_t block_changes;
	uint32_t inode_changes;
	size_t length;
	uint8_t *data;
};

struct pending {
	struct pending *next;
	uint64_t ticket;
	struct rushes_file *file;
	uint8_t *buffer;
	size_t length;
	uint64_t offset;
	void *private_data;
	uint64_t not_before_ns;
};

struct rushes_file {
	uint32_t magic;
	struct rushes_client *client;
	struct rushes_file *next;
	int fd;
	dev_t device;
	ino_t inode;
	struct statx_timestamp born;
};

struct rushes_client {
	uint32_t magic;
	char path[4096];
	struct stat socket;
	bool is_dead;
	int doorbell;
	int death;
	uint64_t ticket;
	int lease_count;
	struct pending *pending;
	struct rushes_file *files;
	struct changes *changes;
};

#define CLIENT_MAGIC 0x11223344
#define FILE_MAGIC 0x55667788

/*
 * The cache, and the daemon to which it belongs: its successor starts with none
 */
static struct block blocks[BLOCK_COUNT];
static struct stat cache_of;
static uint64_t chance_state;

/* xorshift; the seed is the process, so that runs differ */
static uint64_t chance(uint64_t below)
{
	if (chance_state == 0) {
		chance_state = 88172645463325252u ^
			       ((uint64_t)getpid() << 20);
	}
	chance_state ^= chance_state << 13;
	chance_state ^= chance_state >> 7;
	chance_state ^= chance_state << 17;
	return chance_state % below;
}

static uint64_t now_ns(void)
{
	struct timespec now = {0};

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + now.tv_nsec;
}

static uint64_t mix(uint64_t a, uint64_t b, uint64_t c)
{
	uint64_t h = a * 0x9e3779b97f4a7c15u + b;

	h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9u + c;
	h = (h ^ (h >> 32)) * 0x94d049bb133111ebu;
	return (h ^ (h >> 31)) % COUNTER_COUNT;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
	return a->st_ino == b->st_ino &&
	       a->st_ctim.tv_sec == b->st_ctim.tv_sec &&
	       a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

static bool look_alive(struct rushes_client *client)
{
	struct stat st = {0};

	MUST(client->magic == CLIENT_MAGIC);
	if (!client->is_dead && (stat(client->path, &st) == -1 ||
				 !is_same(&st, &client->socket)))
	{
		client->is_dead = true;
	}
	return !client->is_dead;
}

static void forget_all(void)
{
	int i;

	for (i = 0; i < BLOCK_COUNT; i++) {
		blocks[i].device = 0;
	}
}

struct rushes_client *rushes_connect(const char *socket_path, uint32_t door,
				     const char *share, const char *user,
				     const char *address, uint32_t patience_ms,
				     const char **reason)
{
	struct rushes_client *client = calloc(1, sizeof(*client));
	char path[4096 + 16];
	int fd;

	MUST(geteuid() == 0);
	MUST(door == RUSHES_DOOR_SMB);
	MUST(share[0] != '\0' && user[0] != '\0' && address != NULL);
	*reason = "chaos";
	MUST(patience_ms > 0 && patience_ms <= 5000);
	if (client == NULL || stat(socket_path, &client->socket) == -1) {
		errno = ECONNREFUSED;
		free(client);
		return NULL;
	}
	snprintf(client->path, sizeof(client->path), "%s", socket_path);
	snprintf(path, sizeof(path), "%s.changes", socket_path);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	MUST(fd != -1);
	MUST(ftruncate(fd, sizeof(struct changes)) == 0);
	client->changes = mmap(NULL, sizeof(struct changes),
			       PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	MUST(client->changes != MAP_FAILED);
	client->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	client->death = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	MUST(client->doorbell != -1 && client->death != -1);
	inotify_add_watch(client->death, socket_path,
			  IN_DELETE_SELF | IN_ATTRIB);
	if (!is_same(&client->socket, &cache_of)) {
		forget_all();
		cache_of = client->socket;
	}
	client->magic = CLIENT_MAGIC;
	return client;
}

/* Frees nothing that a careless caller might touch again: it must abort. */
void rushes_disconnect(struct rushes_client *client)
{
	struct rushes_file *file = NULL;

	MUST(client->magic == CLIENT_MAGIC);
	MUST(client->pending == NULL);
	MUST(client->lease_count == 0);
	for (file = client->files; file != NULL; file = file->next) {
		if (file->magic == FILE_MAGIC) {
			close(file->fd);
			file->magic = 0;
		}
	}
	close(client->doorbell);
	close(client->death);
	munmap(client->changes, sizeof(*client->changes));
	client->magic = 0;
}

bool rushes_alive(const struct rushes_client *client)
{
	MUST(client->magic == CLIENT_MAGIC);
	return !client->is_dead;
}

uint32_t rushes_heartbeat(const struct rushes_client *client)
{
	MUST(client->magic == CLIENT_MAGIC);
	return (uint32_t)time(NULL);
}

void rushes_event_fds(const struct rushes_client *client, int fds[2])
{
	fds[0] = client->doorbell;
	fds[1] = client->death;
}

struct rushes_file *rushes_open(struct rushes_client *client, int fd,
				const char *path, uid_t uid, gid_t gid)
{
	struct rushes_file *file = NULL;
	struct statx stx = {0};
	struct stat st = {0};

	MUST(path[0] != '\0' && path[0] != '/' && strncmp(path, "./", 2) != 0);
	MUST(fstat(fd, &st) == 0 && S_ISREG(st.st_mode));
	MUST((fcntl(fd, F_GETFL, 0) & O_PATH) == 0);
	if (!look_alive(client)) {
		return NULL;
	}
	file = calloc(1, sizeof(*file));
	MUST(file != NULL);
	MUST(statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &stx) == 0);
	file->fd = dup(fd);
	MUST(file->fd != -1);
	file->born = stx.stx_btime;
	file->device = st.st_dev;
	file->inode = st.st_ino;
	file->client = client;
	file->magic = FILE_MAGIC;
	file->next = client->files;
	client->files = file;
	return file;
}

void rushes_close(struct rushes_file *file)
{
	struct pending *read = NULL;

	MUST(file->magic == FILE_MAGIC);
	for (read = file->client->pending; read != NULL; read = read->next) {
		MUST(read->file != file);
	}
	close(file->fd);
	file->magic = 0;
}

/* A block from the cache, or as the file has it now. */
static struct block *get_block(struct rushes_file *file, uint64_t index)
{
	struct changes *changes = file->client->changes;
	struct block *block =
		&blocks[mix(file->device, file->inode, index) % BLOCK_COUNT];
	uint32_t block_changes = atomic_load(
		&changes->of_block[mix(file->device, file->inode, index)]);
	uint32_t inode_changes = atomic_load(
		&changes->of_inode[mix(file->device, file->inode, 0)]);
	ssize_t length;

	if (block->data != NULL && block->device == file->device &&
	    block->inode == file->inode && block->index == index &&
	    memcmp(&block->born, &file->born, sizeof(block->born)) == 0 &&
	    block->block_changes == block_changes &&
	    (block->length == BLOCK_BYTES ||
	     block->inode_changes == inode_changes))
	{
		return block;
	}
	if (block->data == NULL) {
		block->data = malloc(BLOCK_BYTES);
		MUST(block->data != NULL);
	}
	*block = (struct block) {
		.born = file->born,
		.device = file->device,
		.inode = file->inode,
		.index = index,
		.block_changes = block_changes,
		.inode_changes = inode_changes,
		.data = block->data,
	};
	length = pread(file->fd, block->data, BLOCK_BYTES,
		       index * BLOCK_BYTES);
	if (length < 0) {
		block->device = 0;
		return NULL;
	}
	block->length = length;
	return block;
}

static ssize_t read_cached(struct rushes_file *file, uint8_t *buffer,
			   size_t length, uint64_t offset)
{
	size_t total = 0;

	MUST(file->magic == FILE_MAGIC);
	while (total < length) {
		uint64_t at = offset + total;
		struct block *block = get_block(file, at / BLOCK_BYTES);
		size_t skip = at % BLOCK_BYTES;
		size_t take;

		if (block == NULL) {
			return RUSHES_PLAIN; /* a descriptor for writing only */
		}
		if (block->length <= skip) {
			break;
		}
		take = block->length - skip;
		if (take > length - total) {
			take = length - total;
		}
		memcpy(buffer + total, block->data + skip, take);
		total += take;
		if (block->length < BLOCK_BYTES) {
			break;
		}
	}
	return total;
}

/* The peer's answer to a request. */
static ssize_t answer(struct rushes_file *file, uint8_t *buffer,
		      size_t length, uint64_t offset)
{
	if (chance(400) == 0) {
		return RUSHES_PLAIN;
	}
	if (chance(400) == 0) {
		return -EBADF;
	}
	return read_cached(file, buffer, length, offset);
}

uint64_t rushes_read_send(struct rushes_file *file, void *buffer,
			  size_t length, uint64_t offset, void *private_data)
{
	struct rushes_client *client = file->client;
	struct pending *read = NULL;

	MUST(file->magic == FILE_MAGIC && length > 0);
	if (!look_alive(client) || chance(20) == 0) {
		return 0;
	}
	read = calloc(1, sizeof(*read));
	MUST(read != NULL);
	*read = (struct pending) {
		.next = client->pending,
		.ticket = ++client->ticket,
		.file = file,
		.buffer = buffer,
		.length = length,
		.offset = offset,
		.private_data = private_data,
		.not_before_ns =
			chance(16) == 0 ? now_ns() + 30 * 1000000u : 0,
	};
	client->pending = read;
	MUST(eventfd_write(client->doorbell, 1) == 0);
	return read->ticket;
}

void rushes_request_cancel(struct rushes_client *client, uint64_t ticket)
{
	struct pending **link = NULL;
	struct pending *read = NULL;

	MUST(client->magic == CLIENT_MAGIC && ticket != 0);
	for (link = &client->pending; *link != NULL; link = &(*link)->next) {
		if ((*link)->ticket == ticket) {
			break;
		}
	}
	MUST(*link != NULL);
	read = *link;
	*link = read->next;
	free(read);
}

int rushes_poll(struct rushes_client *client,
		struct rushes_completion *completions, int completion_count)
{
	bool alive = look_alive(client);
	struct pending **link = &client->pending;
	eventfd_t rung = 0;
	int count = 0;

	while (*link != NULL && count < completion_count) {
		struct pending *read = *link;

		/* Later (some much later), and in another order */
		if (alive && (chance(3) == 0 ||
			      read->not_before_ns > now_ns()))
		{
			link = &read->next;
			continue;
		}
		completions[count].private_data = read->private_data;
		completions[count].result = alive ?
			answer(read->file, read->buffer, read->length,
			       read->offset) :
			RUSHES_PLAIN;
		count += 1;
		*link = read->next;
		free(read);
	}
	eventfd_read(client->doorbell, &rung);
	if (client->pending != NULL) {
		MUST(eventfd_write(client->doorbell, 1) == 0);
	}
	return count;
}

ssize_t rushes_read(struct rushes_file *file, void *buffer, size_t length,
		    uint64_t offset)
{
	eventfd_t rung = 0;

	MUST(file->magic == FILE_MAGIC && length > 0);

	/* It waits on the doorbell, and reads rings for other requests, too. */
	eventfd_read(file->client->doorbell, &rung);
	if (!look_alive(file->client)) {
		return RUSHES_PLAIN;
	}
	return answer(file, buffer, length, offset);
}

int rushes_read_begin(struct rushes_file *file, size_t length,
		      uint64_t offset, struct rushes_lease *lease)
{
	eventfd_t rung = 0;
	uint8_t *buffer = NULL;
	ssize_t got;
	size_t at = 0;

	MUST(file->magic == FILE_MAGIC && length > 0);
	eventfd_read(file->client->doorbell, &rung);
	if (!look_alive(file->client)) {
		return RUSHES_PLAIN;
	}
	buffer = malloc(length);
	MUST(buffer != NULL);

	/* Fewer than asked for: a lease spans a limited range */
	if (length > 1 && chance(2) == 0) {
		length = 1 + chance(length);
	}
	got = answer(file, buffer, length, offset);
	if (got < 0) {
		free(buffer);
		return got;
	}
	*lease = (struct rushes_lease) { .id = (uintptr_t)buffer,
					 .length = got };

	/* In uneven parts, as slots are */
	while (at < (size_t)got) {
		size_t piece = got - at;

		if (lease->iov_count < RUSHES_LEASE_IOV_MAX - 1) {
			piece = 1 + chance(piece);
		}
		lease->iov[lease->iov_count].iov_base = buffer + at;
		lease->iov[lease->iov_count].iov_len = piece;
		lease->iov_count += 1;
		at += piece;
	}
	file->client->lease_count += 1;
	return 0;
}

void rushes_read_end(struct rushes_file *file, struct rushes_lease *lease)
{
	MUST(file->magic == FILE_MAGIC);
	MUST(lease->id != 0 && file->client->lease_count > 0);
	memset((void *)(uintptr_t)lease->id, 0xee, lease->length);
	free((void *)(uintptr_t)lease->id);
	lease->id = 0;
	file->client->lease_count -= 1;
}

bool rushes_is_shared(int fd)
{
	MUST(fd >= 0);
	return random() % 2 == 0;
}

void rushes_changed(struct rushes_client *client, dev_t device, ino_t inode,
		    uint64_t offset, uint64_t length)
{
	uint64_t first = offset / BLOCK_BYTES;
	uint64_t last = first + BLOCKS_MAX;
	eventfd_t rung = 0;
	uint64_t i;

	MUST(device != 0 && inode != 0);
	eventfd_read(client->doorbell, &rung);
	if (!look_alive(client)) {
		return;
	}
	if (length == 0) {
		last = first;
	} else if (length < (uint64_t)BLOCKS_MAX * BLOCK_BYTES) {
		last = (offset + length - 1) / BLOCK_BYTES + 1;
	}
	for (i = first; i < last; i++) {
		atomic_fetch_add(
			&client->changes->of_block[mix(device, inode, i)], 1);
	}
	atomic_fetch_add(&client->changes->of_inode[mix(device, inode, 0)], 1);
}

void rushes_resized(struct rushes_client *client, dev_t device, ino_t inode,
		    uint64_t offset)
{
	rushes_changed(client, device, inode, offset,
		       (uint64_t)BLOCKS_MAX * BLOCK_BYTES);
}

void rushes_gone(struct rushes_client *client, dev_t device, ino_t inode)
{
	eventfd_t rung = 0;

	MUST(device != 0 && inode != 0);
	eventfd_read(client->doorbell, &rung);
	look_alive(client);
}

/* It takes no writes: smbd writes itself, as without a lane. */
bool rushes_takes_writes(const struct rushes_client *client)
{
	MUST(client->magic == CLIENT_MAGIC);
	return false;
}

uint64_t rushes_write_send(struct rushes_file *file, const void *buffer,
			   size_t length, uint64_t offset, void *private_data)
{
	MUST(!"a write without a lane");
	return 0;
}

ssize_t rushes_write(struct rushes_file *file, const void *buffer,
		     size_t length, uint64_t offset)
{
	MUST(!"a write without a lane");
	return RUSHES_PLAIN;
}

uint64_t rushes_sync_send(struct rushes_file *file, void *private_data)
{
	MUST(!"a sync without a lane");
	return 0;
}

ssize_t rushes_hold(struct rushes_client *client, dev_t device, ino_t inode)
{
	MUST(!"a hold without a lane");
	return RUSHES_PLAIN;
}

bool rushes_timed(struct rushes_client *client, dev_t device, ino_t inode,
		  int64_t changed_ns)
{
	MUST(!"a time without a fact");
	return false;
}

struct rushes_facts *rushes_facts_open(const char *socket_path)
{
	MUST(geteuid() == 0);
	MUST(socket_path[0] != '\0');
	return NULL;
}

void rushes_facts_close(struct rushes_facts *facts)
{
	MUST(facts == NULL);
}

bool rushes_has_reserve(const struct rushes_facts *facts, dev_t device,
			ino_t inode, uint64_t *before)
{
	MUST(facts == NULL);
	return false;
}

bool rushes_is_loose(const struct rushes_facts *facts, dev_t device,
		     ino_t inode)
{
	MUST(facts == NULL);
	return false;
}

bool rushes_fact_of(const struct rushes_facts *facts, dev_t device,
		    ino_t inode, struct rushes_fact *fact)
{
	MUST(facts == NULL);
	return false;
}

bool rushes_has_facts(const struct rushes_facts *facts)
{
	MUST(!"no table, and it is looked through");
	return false;
}

uint64_t rushes_generation(int fd)
{
	MUST(!"no table, and a file of it is looked at");
	return 0;
}

bool rushes_plain_begin(const struct rushes_facts *facts)
{
	MUST(!"no table, and it is locked");
	return false;
}

void rushes_plain_end(const struct rushes_facts *facts)
{
	MUST(!"no table, and it is unlocked");
}

void rushes_lose(struct rushes_client *client)
{
	MUST(client->magic == CLIENT_MAGIC);
	client->is_dead = true;
}

bool rushes_is_lost(const struct rushes_client *client)
{
	MUST(client->magic == CLIENT_MAGIC);
	return false;
}

bool rushes_reconnect(struct rushes_client *client, uint32_t patience_ms)
{
	MUST(!"a client that is not lost is to be found");
	return false;
}

bool rushes_is_recovered(const struct rushes_client *client)
{
	return true;
}

void rushes_give_up(struct rushes_client *client)
{
	MUST(!"a client that is not lost is given up");
}
