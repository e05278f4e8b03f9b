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

// admit finds a slot's member. If all its sockets exist and its check passes, admit gives it the slot. changed reports
// whether the slot changed: a member already admitted with the same sockets is left alone.
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
	// The new member may hold sessions of devices in other slots, and other members may hold sessions of its devices.
	if err := e.Owe(p, nil); err != nil {
		return false, err
	}
	if same {
		// The sockets were inherited, from systemd or weir steer run. Packets in their queues must not meet a changing
		// slot.
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

// admittedWith reports whether a row is admitted with exactly these sockets. holder is the recorded process.
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

// newSlot returns a row's new content for the process of a.
func newSlot(a *service.Adoption, state slots.RowState) (bpf.SteerSlot, error) {
	pid := a.PIDs()[0]
	start, err := pidfd.StartTime(pid)
	if err != nil {
		return bpf.SteerSlot{}, fmt.Errorf("%w: process %d has exited", service.ErrNotRunning, pid)
	}
	return bpf.SteerSlot{State: uint32(state), Tgid: uint32(pid), Since: kernel.Monotonic(), Start: start}, nil
}

// succeed changes the process of a row and keeps its sockets.
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
	// After this store, an exit of the previous process no longer affects the row.
	if err := e.Pins.Maps["slots"].Put(row, s); err != nil {
		return err
	}
	kernel.Step("steer:succeeded")
	return e.watchExits(row, a, keep)
}

// watchExits makes steer_exit withdraw the row when one of its processes exits. With keep, no exit withdraws it.
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

// assign gives a slot to a member with other sockets: as the next generation if the service has generations, otherwise
// at once. It returns the resulting service.
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

// assignNow gives a slot to a member with other sockets, without a generation.
func (e *Engine) assignNow(p *record.Service, slot int, a *service.Adoption, keep bool, ns *netns.Handle) (err error) {
	at := slots.OwnEntries
	if e.Kind == spec.EngineReuseport {
		if p.Bypassed { // joining its group would steer the service again
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

// install replaces a row's sockets. The row is withdrawn meanwhile. Otherwise a packet could meet the new member's UDP
// socket and the previous member's listener.
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
			continue // already in its entry
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

// ExplainSocket adds the reason to an error of a socket map.
func ExplainSocket(s service.Adopted, err error) error {
	hint := ""
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		hint = ": socket maps accept bound TCP listeners and UDP sockets, not MPTCP, kTLS or sockets with an upper protocol"
	case errors.Is(err, unix.EBUSY):
		hint = ": it is in another program's socket map or reuseport array"
	}
	return fmt.Errorf("process %d, descriptor for %s: %w%s", s.PID, s.Endpoint, err, hint)
}

// watchExit makes steer_exit withdraw the row when process tgid exits.
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
	return fmt.Errorf("process %d already serves %d slots, the maximum", tgid, spec.MaxExits)
}

// confirm closes the race between the adoption of a process and its exit. steer_exit handles an exit after the
// admission, confirm an exit before it.
func (e *Engine) confirm(row uint32, a *service.Adoption) error {
	if a.Alive() {
		return nil
	}
	if err := e.SetState(row, slots.Exited); err != nil {
		return err
	}
	return fmt.Errorf("%w: process %d exited while it was adopted", service.ErrNotRunning, a.PIDs()[0])
}

// SetState changes only the state and the time of a row.
func (e *Engine) SetState(row uint32, state slots.RowState) error {
	var s bpf.SteerSlot
	if err := e.Pins.Maps["slots"].Lookup(row, &s); err != nil {
		return err
	}
	s.State, s.Since = uint32(state), kernel.Monotonic()
	return e.Pins.Maps["slots"].Put(row, s)
}

// raiseSockets raises backlogs and receive buffers of adopted sockets to the service's minimum. The settings belong to
// the socket, so they apply to the daemon's own descriptor too. A failure must not prevent the admission.
func raiseSockets(p *record.Service, a *service.Adoption) {
	for _, s := range a.Sockets {
		_ = bounded.Run(bounded.Socket(s.FD), func() error { raiseSocket(p, s); return nil }) // a failure is ignored
	}
}

func raiseSocket(p *record.Service, s service.Adopted) {
	if want := *p.Service.Backlog; s.Endpoint.Proto == unix.IPPROTO_TCP && int(s.Socket.SendQueue) < want {
		unix.Listen(s.FD, want) // the kernel caps it at net.core.somaxconn
	}
	if want := *p.Service.ReceiveBuffer; s.Endpoint.Proto == unix.IPPROTO_UDP && int(s.Socket.Mem.RcvBuf) < want {
		// The kernel doubles the requested size, and counts buffers with their overhead.
		if unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, want/2) != nil {
			unix.SetsockoptInt(s.FD, unix.SOL_SOCKET, unix.SO_RCVBUF, want/2)
		}
	}
}

// PutSocket puts a socket into a socket map. The kernel locks the socket for this, and its owner may hold the lock.
// After a timeout the entry stays empty: if the call returns later, its entry is deleted.
func PutSocket(m *ebpf.Map, key uint32, fd int) error {
	own, err := bounded.Do(bounded.Socket(fd), func() (*ebpf.Map, error) {
		own, err := m.Clone() // m may be closed when this call continues
		if err != nil {
			return nil, err
		}
		return own, own.Put(key, uint64(fd))
	}, func(own *ebpf.Map, err error) {
		if err == nil {
			_ = own.Delete(key) // the socket may have closed since
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

// FallBack gives a slot back to its predecessor if that process still runs and drains. It reports whether it did.
func FallBack(l *kernel.WriteLock, s slots.Slot) (bool, error) {
	e, p, err := OpenSlot(l, s)
	if err != nil {
		return false, err
	}
	defer e.Close()
	return e.FallBack(p, s.Slot)
}

// adopt finds a member's sockets. With generations it prefers a new process beside the current one.
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
