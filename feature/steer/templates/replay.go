// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// A replay must not fill the socket of a member that has just started, so its queue is checked after each batch.
const (
	replayBatch = 32
	replayStall = 200 * time.Millisecond // a member that reads nothing for this time is postponed
	ReplayTries = 6                      // attempts for a session that was not sent, or dropped by the member's socket
	replayAgain = 100 * time.Millisecond // first delay of a retry: a collector without templates cannot decode
	replayLater = 2 * time.Second        // maximum delay; it doubles each time
)

// dueSession is a session with templates that a member lacks.
type dueSession struct {
	Key    bpf.TemplatesSession
	last   uint64 // time of the last message
	proven bool
}

// replayTo is a member and its missing sessions.
type replayTo struct {
	service  *Service
	slot     int
	endpoint int
	member   MemberID
	Sessions []dueSession
}

// Replay sends the missing templates to every member.
func (t *Scope) Replay(ctx context.Context) error {
	due := t.Due()
	if len(due) == 0 {
		t.resetBackoff()
		return nil
	}
	t.Inject.forget()
	var errs []error
	for _, to := range due {
		if ctx.Err() != nil {
			return nil
		}
		start, sent := time.Now(), 0
		err := t.ns.Do(func() (err error) { sent, err = t.replayTo(ctx, to); return err })
		if sent > 0 {
			t.log.Info("templates replayed", "service", to.service.Name, "slot", to.slot, "pid", to.member.Tgid,
				"exporters", sent, "of", len(to.Sessions), "duration", time.Since(start).Round(time.Millisecond))
		}
		errs = append(errs, err)
	}
	t.resetBackoff()
	return errors.Join(errs...)
}

// resetBackoff resets the retry delay if nothing remains.
func (t *Scope) resetBackoff() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.Retry.IsZero() {
		t.retries = 0
	}
}

// Due returns the due replays: proven sessions first, then the most recently active ones, because they send most.
func (t *Scope) Due() []*replayTo {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unserved, t.Retry = false, time.Time{}
	current := t.Book.current(t.lastHeard)
	type target struct {
		service  string
		slot     int
		endpoint int
	}
	all := map[target]*replayTo{}
	for key, s := range t.Book.Sessions {
		svc, endpoint := t.findService(collectorAddr(key))
		if svc == nil || svc.coming {
			continue // arrive makes all sessions due
		}
		slot, who := svc.memberFor(exporterAddr(key).Addr())
		if who == (MemberID{}) || who == s.Served {
			continue
		}
		if !current(key) {
			t.later()
			continue
		}
		at := target{svc.Name, slot, endpoint}
		if all[at] == nil {
			all[at] = &replayTo{service: svc, slot: slot, endpoint: endpoint, member: who}
		}
		all[at].Sessions = append(all[at].Sessions, dueSession{key, t.Store.heard(key).Last, s.Proven})
	}
	var out []*replayTo
	for _, to := range all {
		slices.SortFunc(to.Sessions, func(a, b dueSession) int {
			if a.proven != b.proven {
				if a.proven {
					return -1
				}
				return 1
			}
			return cmp.Compare(b.last, a.last)
		})
		out = append(out, to)
	}
	return out
}

// replayTo sends one member's replays in batches. It runs in the namespace.
func (t *Scope) replayTo(ctx context.Context, to *replayTo) (sent int, err error) {
	cookie := to.service.Slots[to.slot].Sockets[to.endpoint].Cookie
	sk := udpSocket(cookie)
	for batch := range slices.Chunk(to.Sessions, replayBatch) {
		for stalled := time.Now(); ctx.Err() == nil && sk != nil && sk.Mem.RcvAlloc > sk.Mem.RcvBuf/2; sk = udpSocket(cookie) {
			if time.Since(stalled) > replayStall {
				t.again()
				return sent, nil // a stopped or slow process: others must not wait for it
			}
			time.Sleep(time.Millisecond)
		}
		if ctx.Err() != nil {
			return sent, nil
		}
		failed := map[bpf.TemplatesSession]error{}
		for _, d := range batch {
			if serr := t.send(d.Key); serr != nil {
				failed[d.Key], err = serr, serr // the others may succeed
			}
		}
		before := sk
		sk = udpSocket(cookie)
		dropped := before != nil && sk != nil && sk.Mem.Drops != before.Mem.Drops
		if serr := t.served(to, batch, failed, dropped); serr != nil {
			return sent, serr
		}
		sent += len(batch) - len(failed)
	}
	return sent, err
}

// again schedules a retry.
func (t *Scope) again() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.later()
}

// later is again for callers with the lock.
func (t *Scope) later() {
	if t.Retry.IsZero() {
		t.Retry = time.Now().Add(min(replayAgain<<t.retries, replayLater))
		t.retries = min(t.retries+1, 8)
	}
}

// Waiting reports whether a session may be due now.
func (t *Scope) Waiting() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unserved || !t.Retry.IsZero() && time.Now().After(t.Retry)
}

// pending reports whether a session may be due now or later.
func (t *Scope) pending() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unserved || !t.Retry.IsZero() || t.coming()
}

// udpSocket returns the socket with a cookie, or nil.
func udpSocket(cookie uint64) *sockdiag.Socket {
	socks, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_UDP, States: 1 << sockdiag.Close})
	if err != nil {
		return nil
	}
	i := slices.IndexFunc(socks, func(s sockdiag.Socket) bool { return s.Cookie == cookie })
	if i < 0 {
		return nil
	}
	return &socks[i]
}

// send replays one session in its current state.
func (t *Scope) send(key bpf.TemplatesSession) error {
	// Finding an interface may block while another process changes one. Meanwhile the exporter continues, so its latest
	// header is read afterwards.
	limit := t.Inject.limit(t.Store.heard(key).Ifindex)
	t.mu.Lock()
	s := t.Book.Sessions[key]
	if s == nil {
		t.mu.Unlock()
		return nil // forgotten meanwhile
	}
	h := t.Store.heard(key)
	messages := s.replay(key, h, limit)
	t.mu.Unlock()
	for _, m := range messages {
		err := t.Inject.send(exporterAddr(key), collectorAddr(key), h.Ifindex, m)
		for wait := time.Microsecond; errors.Is(err, unix.ENOBUFS) && wait < 10*time.Millisecond; wait *= 2 {
			time.Sleep(wait)
			err = t.Inject.send(exporterAddr(key), collectorAddr(key), h.Ifindex, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// served records that a member has the templates of a batch. If they were not sent, or its socket dropped packets
// meanwhile, they are sent again, up to ReplayTries times.
func (t *Scope) served(to *replayTo, batch []dueSession, failed map[bpf.TemplatesSession]error, dropped bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now().UnixNano()
	c := t.counts[to.service.Name]
	var errs []error
	for _, d := range batch {
		s := t.Book.Sessions[d.Key]
		if s == nil {
			continue
		}
		s.tries++
		if failed[d.Key] == nil {
			s.Replayed, s.Replays = now, s.Replays+1
			c.Replayed++
		}
		if (dropped || failed[d.Key] != nil) && s.tries < ReplayTries {
			t.later()
		} else {
			s.Served, s.tries = to.member, 0
		}
		errs = append(errs, t.Store.Save(d.Key, s))
	}
	t.counts[to.service.Name] = c
	return errors.Join(errs...)
}
