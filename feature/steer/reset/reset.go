// SPDX-License-Identifier: Apache-2.0

package reset

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
)

// Due returns the number of the latest change with due resets in a namespace's engine. 0 means that none are due.
func Due(r *kernel.Root, i kernel.Instance) (uint32, error) {
	o, err := r.Open(i, "sync")
	if err != nil {
		return 0, err
	}
	defer o.Close()
	var v uint32
	err = o.Maps["sync"].Lookup(engine.ResetsDue, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil // an engine of a version without this word
	}
	return v, err
}

// finish clears the due resets, unless another change came meanwhile.
func finish(ctx context.Context, r *kernel.Root, i kernel.Instance, was uint32) error {
	l, err := r.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	now, err := Due(r, i)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil || now != was {
		return err
	}
	o, err := l.Open(i, "sync")
	if err != nil {
		return err
	}
	defer o.Close()
	return o.Maps["sync"].Put(engine.ResetsDue, uint32(0))
}

// Reset is one reset session, or a failed reset.
type Reset struct {
	Service string
	state.Session
	Done, Of int   // number of this session, and of all known so far
	Err      error // reason of a failed reset
	Handed   bool  // not reset: it continues at the right member
}

// Hand moves misplaced sessions to the member of their slot where possible. It returns the sessions to reset, and the
// sessions now at the right member. All others wait for their member.
type Hand func(ctx context.Context, s *state.Service, misplaced []state.Session) (stay, handed []state.Session)

// ErrCannotReset means that this kernel cannot close sessions of other processes.
var ErrCannotReset = fmt.Errorf("%w: sessions of other processes cannot be reset: the kernel lacks CONFIG_INET_DIAG_DESTROY", kernel.ErrUnsupported)

// ResetDue resets the sessions misplaced by changes, in every service of this host, and calls each for every session. A
// nil rate means the services' own rates. Services with rate 0 are skipped. It waits for other processes with the same
// task. Call it after changes, without the lock. A non-nil hand moves sessions where possible, instead of a reset.
func ResetDue(ctx context.Context, r *kernel.Root, rate *spec.Rate, hand Hand, each func(Reset)) error {
	all, err := r.Instances(spec.Name)
	if err != nil {
		return err
	}
	var errs []error
	for _, i := range all {
		if _, ok := record.EngineKind(i); !ok {
			continue
		}
		if v, err := Due(r, i); err != nil || v == 0 {
			continue //nolint:nilerr // gone, or of another ABI: nothing that this could finish
		}
		if err := ResetEngine(ctx, r, i, rate, hand, true, each); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// ErrBusy means that another process resets sessions.
var ErrBusy = errors.New("another process resets sessions")

// ResetEngine resets the due sessions of one engine. Without wait it returns ErrBusy if another process does so.
func ResetEngine(ctx context.Context, r *kernel.Root, i kernel.Instance, rate *spec.Rate, hand Hand, wait bool, each func(Reset)) error {
	claim, err := ClaimEngine(ctx, r, i, wait)
	if err != nil {
		return err
	}
	defer claim()
	was, err := Due(r, i)
	if err != nil || was == 0 {
		return err
	}
	st, err := state.Read(ctx, r)
	if err != nil {
		return err
	}
	var errs []error
	for k := range st.Services {
		s := &st.Services[k]
		pace := s.Record.Service.ResetRate
		if rate != nil {
			pace = rate
		}
		if s.Record.EngineInstance(s.PinScope) != i || pace == nil || *pace == 0 {
			continue
		}
		if err := resetService(ctx, r, s, *pace, hand, each); err != nil {
			errs = append(errs, err)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err() // weir serve continues
	}
	// Clear them also after errors: another attempt would fail the same way.
	return errors.Join(append(errs, finish(ctx, r, i, was))...)
}

// ClaimEngine claims the resets of an engine. Without wait it returns ErrBusy if another process has the claim.
func ClaimEngine(ctx context.Context, r *kernel.Root, i kernel.Instance, wait bool) (release func(), err error) {
	for {
		release, ok, err := r.Claim(i)
		if err != nil || ok {
			return release, err
		}
		if !wait {
			return nil, ErrBusy
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// ResetService resets the misplaced sessions of one service now, even if no reset is due.
func ResetService(ctx context.Context, r *kernel.Root, scope, name string, rate spec.Rate, hand Hand, each func(Reset)) error {
	p, err := record.Read(r, record.Instance(scope, name))
	if err != nil {
		return err
	}
	release, err := ClaimEngine(ctx, r, p.EngineInstance(scope), true)
	if err != nil {
		return err
	}
	defer release()
	s, err := state.ReadService(r, record.Instance(scope, name))
	if errors.Is(err, kernel.ErrNotExist) {
		return nil // the service was removed
	} else if err != nil {
		return err
	}
	return resetService(ctx, r, &s, rate, hand, each)
}

// queueTimeout is the maximum wait for sessions that no process has accepted yet. Their member is unknown until then.
const queueTimeout = 5 * time.Second

// rereadInterval is the interval of new readings during resets, because other changes may happen meanwhile.
const rereadInterval = time.Second

// resetter resets the sessions of one service.
type resetter struct {
	root        *kernel.Root
	scope, name string
	every       time.Duration
	state       *state.Service // for the first reading, then nil
	hand        Hand           // may be nil
	each        func(Reset)
	first       map[uint64]bool // sessions at the start: later ones follow the new rules
	tried       map[uint64]bool
	next        time.Time
	done        int
}

// resetService resets the sessions of a service. The first reading may use an outdated state, because later changes
// make resets due again. Each new reading reads every service of the namespace, for their endpoints.
func resetService(ctx context.Context, r *kernel.Root, s *state.Service, rate spec.Rate, hand Hand, each func(Reset)) error {
	name := s.Name
	t := &resetter{root: r, scope: s.PinScope, name: name, every: time.Duration(float64(time.Second) / float64(rate)),
		state: s, hand: hand, each: each, tried: map[uint64]bool{}}
	deadline := time.Now().Add(queueTimeout)
	for {
		found, waiting, err := t.findMisplaced(ctx)
		if errors.Is(err, kernel.ErrNotExist) {
			return nil // the service was removed
		} else if err != nil {
			return fmt.Errorf("find misplaced sessions of service %s: %w", name, err)
		}
		found = t.handOver(ctx, found)
		switch {
		case len(found) > 0:
			if err := t.some(ctx, found); err != nil {
				return err
			}
		case waiting == 0 || time.Now().After(deadline):
			return nil
		default:
			if err := slots.Sleep(ctx, 50*time.Millisecond); err != nil {
				return err
			}
		}
	}
}

// findMisplaced lists misplaced sessions confirmed by two readings. One reading may miss the process of a session if
// the process passes it to its child meanwhile.
func (t *resetter) findMisplaced(ctx context.Context) (found []state.Session, waiting int, err error) {
	for try := range 2 {
		s, err := t.read()
		if err != nil {
			return nil, 0, err
		}
		if t.first == nil {
			if err := t.begin(s); err != nil {
				return nil, 0, err
			}
		}
		again, queue, err := s.Sessions(ctx, t.first)
		if err != nil {
			return nil, 0, err
		}
		before := map[uint64]bool{}
		for _, f := range found {
			before[f.Socket.Cookie] = true
		}
		found = nil
		for _, f := range again {
			if !t.tried[f.Socket.Cookie] && (try == 0 || before[f.Socket.Cookie]) {
				found = append(found, f)
			}
		}
		waiting = len(queue)
		if len(found) == 0 {
			break
		}
	}
	return found, waiting, nil
}

func (t *resetter) read() (*state.Service, error) {
	if s := t.state; s != nil {
		t.state = nil
		return s, nil
	}
	s, err := state.ReadService(t.root, record.Instance(t.scope, t.name))
	return &s, err
}

// handOver moves sessions where possible. It returns the sessions to reset.
func (t *resetter) handOver(ctx context.Context, found []state.Session) (stay []state.Session) {
	if t.hand == nil || len(found) == 0 {
		return found
	}
	s, err := state.ReadService(t.root, record.Instance(t.scope, t.name))
	if err != nil {
		return found
	}
	stay, handed := t.hand(ctx, &s, found)
	for _, f := range found {
		t.tried[f.Socket.Cookie] = true
	}
	for _, f := range stay {
		delete(t.tried, f.Socket.Cookie)
	}
	for _, f := range handed {
		t.each(Reset{Service: t.name, Session: f, Handed: true})
	}
	return stay
}

// begin records the current sessions.
func (t *resetter) begin(s *state.Service) error {
	t.first = map[uint64]bool{}
	if s.Bypassed || !s.By.KeepsDevices() || len(s.Table) == 0 {
		return nil
	}
	socks, err := s.Established()
	for _, sk := range socks {
		t.first[sk.Cookie] = true
	}
	return err
}

// some resets sessions at the rate, for at most rereadInterval.
func (t *resetter) some(ctx context.Context, found []state.Session) error {
	p, err := record.Read(t.root, record.Instance(t.scope, t.name))
	if err != nil {
		return err
	}
	until := time.Now().Add(rereadInterval)
	of := t.done + len(found)
	for _, f := range found {
		if t.done > 0 && time.Now().After(until) {
			return nil
		}
		if wait := time.Until(t.next); wait > 0 {
			if err := slots.Sleep(ctx, wait); err != nil {
				return err
			}
		}
		t.tried[f.Socket.Cookie] = true
		err := destroy(p, t.scope, f.Socket)
		if errors.Is(err, sockdiag.ErrNoSocket) {
			of--
			continue // the session has ended
		}
		t.next = time.Now().Add(t.every)
		t.done++
		if errors.Is(err, errors.ErrUnsupported) {
			err = ErrCannotReset
		}
		t.each(Reset{Service: t.name, Session: f, Done: t.done, Of: of, Err: err})
		kernel.Step("steer:reset")
		if errors.Is(err, ErrCannotReset) {
			for _, rest := range found {
				if !t.tried[rest.Socket.Cookie] {
					t.done++
					t.each(Reset{Service: t.name, Session: rest, Done: t.done, Of: of, Err: err})
				}
			}
			return err
		}
	}
	return nil
}

func destroy(p *record.Service, scope string, sk sockdiag.Socket) error {
	inode, err := record.ScopeInode(scope)
	if err != nil {
		return err
	}
	ns, err := slots.OpenNetns(p.Netns, netns.ID{Inode: inode, Cookie: p.Cookie})
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(func() error { return DestroySocket(sk) })
}

// DestroySocket closes a session's socket. A test replaces it to simulate a kernel without this function.
var DestroySocket = sockdiag.Destroy
