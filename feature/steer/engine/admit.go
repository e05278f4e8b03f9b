// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/bounded"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// admit looks for a slot's member and, if all its sockets are there and its
// check has passed, gives it the slot. changed says whether anything did: a
// member that holds its slot with the same sockets is left alone.
func (e *Engine) admit(ctx context.Context, p *record.Service, slot int, m service.Member, ns *netns.Handle) (changed bool, err error) {
	a, err := e.adopt(ctx, p, slot, m, ns)
	if err != nil {
		return false, err
	}
	defer a.Close()
	row := p.Row(slot)
	same, holder, err := e.admittedWith(row, a)
	if err != nil || same && holder == a.PIDs()[0] {
		return false, err
	}
	if err := e.vetted(ctx, p, slot, m, a, ns); err != nil {
		return false, err
	}
	// It may hold sessions of devices that belong elsewhere, and others its own.
	if err := e.Owe(p, nil); err != nil {
		return false, err
	}
	if same {
		// Sockets that were passed on, by systemd or by weir steer run: what waits in them
		// must not meet a slot that is changing.
		err = e.succeed(row, a, m.Keep)
	} else if p, err = e.assign(p, slot, a, m.Keep, ns); err == nil {
		row = p.Row(slot)
	}
	if err != nil {
		return false, err
	}
	raiseSockets(p, a)
	if m.Keep {
		return true, nil
	}
	return true, e.confirm(row, a)
}

// admittedWith says whether a row is admitted with exactly these sockets, and whose
// process it is by now.
func (e *Engine) admittedWith(row uint32, a *service.Adoption) (same bool, holder int, err error) {
	var s bpf.SteerSlot
	if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
		return false, 0, err
	}
	if slots.RowState(s.State) != slots.Admitted {
		return false, 0, nil
	}
	for i, sock := range a.Sockets {
		var cookie uint64
		err := e.Pins.Maps["sockets"].Lookup(row*spec.MaxEndpoints+uint32(s.At[i]), &cookie)
		if err != nil || cookie != sock.Socket.Cookie {
			return false, 0, nil //nolint:nilerr // a closed socket's entry is gone
		}
	}
	return true, int(s.Tgid), nil
}

// newSlot is a row's new content for the process that holds the sockets.
func newSlot(a *service.Adoption, state slots.RowState) (bpf.SteerSlot, error) {
	pid := a.PIDs()[0]
	start, err := pidfd.StartTime(pid)
	if err != nil {
		return bpf.SteerSlot{}, fmt.Errorf("%w: process %d has exited", service.ErrNotRunning, pid)
	}
	return bpf.SteerSlot{State: uint32(state), Tgid: uint32(pid), Since: kernel.Monotonic(), Start: start}, nil
}

// succeed makes another process the holder of a row whose sockets stay.
func (e *Engine) succeed(row uint32, a *service.Adoption, keep bool) error {
	var was bpf.SteerSlot
	if err := e.Pins.Maps["slots"].Lookup(row, &was); err != nil {
		return err
	}
	s, err := newSlot(a, slots.Admitted)
	if err != nil {
		return err
	}
	s.At = was.At
	// The exit of the process before counts no more once the row names the new one.
	if err := e.Pins.Maps["slots"].Put(row, s); err != nil {
		return err
	}
	kernel.Step("steer:succeeded")
	return e.watchExits(row, a, keep)
}

// watchExits has steer_exit withdraw the row when its processes exit, and for
// no other process; with keep, for none at all.
func (e *Engine) watchExits(row uint32, a *service.Adoption, keep bool) error {
	if err := e.forgetExits(row); err != nil || keep {
		return err
	}
	for _, pid := range a.PIDs() {
		if err := e.watchExit(uint32(pid), row); err != nil {
			return err
		}
	}
	return nil
}

// assign gives a slot to a member with other sockets: as the next generation where
// the service has some, else at once. It returns the service as it is then.
func (e *Engine) assign(p *record.Service, slot int, a *service.Adoption, keep bool, ns *netns.Handle) (*record.Service, error) {
	next, err := e.superseded(p, slot, a)
	if err != nil {
		return p, err
	}
	if next {
		return e.supersede(p, slot, a, keep, ns)
	}
	return p, e.assignNow(p, slot, a, keep, ns)
}

// assignNow gives a slot to a member with other sockets.
func (e *Engine) assignNow(p *record.Service, slot int, a *service.Adoption, keep bool, ns *netns.Handle) (err error) {
	at := slots.OwnEntries
	if e.Kind == spec.EngineReuseport {
		if p.Bypassed { // to join its group would steer it again
			return fmt.Errorf("%w: weir bypass --off %s", errBypassed, p.Service.Name)
		}
		if err := e.checkUnshared(p, p.Row(slot), a); err != nil {
			return err
		}
		if at, err = e.join(p, p.Row(slot), a, ns); err != nil {
			return err
		}
	}
	return e.install(p, slot, at, a, keep)
}

// install swaps a row's sockets. The row is withdrawn meanwhile: a packet must
// not meet the new member's UDP socket and the old one's listener.
func (e *Engine) install(p *record.Service, slot int, at [spec.MaxEndpoints]uint8, a *service.Adoption, keep bool) error {
	row := p.Row(slot)
	all, sockets := e.Pins.Maps["slots"], e.Pins.Maps["sockets"]
	s, err := newSlot(a, slots.Changing)
	if err != nil {
		return err
	}
	s.At = at
	if err := all.Put(row, s); err != nil {
		return err
	}
	kernel.Step("steer:changing")
	if err := e.forgetExits(row); err != nil {
		return err
	}
	if e.Kind == spec.EngineReuseport {
		if err := e.vacate(p, row, a); err != nil {
			return err
		}
	}
	for i, sock := range a.Sockets {
		if int(at[i]) != i {
			continue // it is in its place already
		}
		if err := PutSocket(sockets, row*spec.MaxEndpoints+uint32(i), sock.FD); err != nil {
			return ExplainSocket(sock, err)
		}
		kernel.Step("steer:socket")
	}
	if e.Kind == spec.EngineReuseport && p.Service.By == spec.ByQUIC {
		if err := e.noteCookies(p, slot, a); err != nil {
			return err
		}
	}
	if err := e.watchExits(row, a, keep); err != nil {
		return err
	}
	s.State = uint32(slots.Admitted)
	if err := all.Put(row, s); err != nil {
		return err
	}
	kernel.Step("steer:admitted")
	return nil
}

// ExplainSocket names the sockets that a socket map refuses.
func ExplainSocket(s service.Adopted, err error) error {
	hint := ""
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		hint = ": socket maps take bound TCP listeners and UDP sockets, not MPTCP, kTLS or sockets with an upper protocol"
	case errors.Is(err, unix.EBUSY):
		hint = ": another program's socket map or reuseport array holds it"
	}
	return fmt.Errorf("process %d, descriptor for %s: %w%s", s.PID, s.Endpoint, err, hint)
}

// watchExit has steer_exit withdraw the row when the process exits.
func (e *Engine) watchExit(tgid, row uint32) error {
	m := e.Pins.Maps["exits"]
	if m == nil {
		return nil
	}
	for n := range uint32(spec.MaxExits) {
		err := m.Update(bpf.SteerExitKey{Tgid: tgid, N: n}, row, ebpf.UpdateNoExist)
		if err == nil || !errors.Is(err, ebpf.ErrKeyExist) {
			return err
		}
	}
	return fmt.Errorf("process %d serves %d slots already, the most one process can", tgid, spec.MaxExits)
}

// confirm closes the race between adopting a process and its exit: whoever
// exits after the row is admitted is seen by steer_exit, whoever did before, here.
func (e *Engine) confirm(row uint32, a *service.Adoption) error {
	if a.Alive() {
		return nil
	}
	if err := e.SetState(row, slots.Exited); err != nil {
		return err
	}
	return fmt.Errorf("%w: process %d exited while it was adopted", service.ErrNotRunning, a.PIDs()[0])
}

// SetState changes the state of a row and nothing else of it.
func (e *Engine) SetState(row uint32, state slots.RowState) error {
	var s bpf.SteerSlot
	if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
		return err
	}
	s.State, s.Since = uint32(state), kernel.Monotonic()
	return e.Pins.Maps["slots"].Put(row, s)
}

// raiseSockets lifts backlogs and receive buffers of adopted sockets to the service's
// minimum. The settings belong to the socket, so the daemon's own descriptor
// has them too. Failing at it must not keep a member out.
func raiseSockets(p *record.Service, a *service.Adoption) {
	for _, s := range a.Sockets {
		_ = bounded.Run(bounded.Socket(s.FD), func() error { raiseSocket(p, s); return nil }) // likewise
	}
}

func raiseSocket(p *record.Service, s service.Adopted) {
	if want := *p.Service.Backlog; s.Endpoint.Proto == unix.IPPROTO_TCP && int(s.Socket.SendQueue) < want {
		unix.Listen(s.FD, want) // the kernel caps it at net.core.somaxconn
	}
	if want := *p.Service.ReceiveBuffer; s.Endpoint.Proto == unix.IPPROTO_UDP && int(s.Socket.Mem.RcvBuf) < want {
		// The kernel doubles what is asked for, and counts buffers with their overhead.
		if unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, want/2) != nil {
			unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_RCVBUF, want/2)
		}
	}
}

// PutSocket puts a socket into a socket map. The kernel locks the socket for that, and its owner may hold the lock: then the
// place stays empty, also should the call come back later.
func PutSocket(m *ebpf.Map, key uint32, fd int) error {
	own, err := bounded.Do(bounded.Socket(fd), func() (*ebpf.Map, error) {
		own, err := m.Clone() // m may be closed when this goes on
		if err != nil {
			return nil, err
		}
		return own, own.Put(key, uint64(fd))
	}, func(own *ebpf.Map, err error) {
		if err == nil {
			_ = own.Delete(key) // it may have closed since
		}
		if own != nil {
			own.Close()
		}
	})
	if own != nil {
		own.Close()
	}
	return err
}

// FallBack gives a slot back to its predecessor, if that still runs and drains. It says
// whether it did.
func FallBack(l *kernel.WriteLock, s slots.Slot) (bool, error) {
	e, p, err := OpenSlot(l, s)
	if err != nil {
		return false, err
	}
	defer e.Close()
	return e.FallBack(p, s.Slot)
}

// adopt finds a member's sockets: of a service with generations those of its next
// process, if there is one beside the one that serves.
func (e *Engine) adopt(ctx context.Context, p *record.Service, slot int, m service.Member, ns *netns.Handle) (*service.Adoption, error) {
	if p.Service.Generations != nil && m.Not == nil {
		now, err := slots.Evaluate(e.Pins, p, slot)
		if err != nil {
			return nil, err
		}
		next := m
		if next.Not = now.Cookies(); now.Admitted() {
			if a, err := next.Adopt(ctx, ns, p.Service.Spec); err == nil || !errors.Is(err, service.ErrNoSocket) {
				return a, err
			}
		}
	}
	return m.Adopt(ctx, ns, p.Service.Spec)
}
