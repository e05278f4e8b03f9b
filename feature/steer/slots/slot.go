// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Cookies returns the cookies of the slot's sockets, of both generations.
func (s State) Cookies() map[uint64]bool {
	out := map[uint64]bool{}
	for _, c := range s.before {
		out[c] = true
	}
	for _, sock := range s.Sockets {
		out[sock.Cookie] = true
	}
	return out
}

// OccupantMember returns the process in the slot as a member.
func (s State) OccupantMember(configured *service.Member) *service.Member {
	m := service.Member{Slot: s.Slot, PID: s.PID}
	if configured != nil {
		m.Bound, m.Keep = configured.Bound, configured.Keep
	}
	return &m
}

// Slot names a slot of a published service. Scope is the pin directory of its network namespace.
type Slot struct {
	Scope   string
	Service string
	Slot    int
}

// OpenNetns opens the network namespace of the slot's service. An error wraps ErrNetnsGone if the namespace is gone.
// The caller closes it.
func (s Slot) OpenNetns(p *record.Service) (*netns.Handle, error) {
	inode, err := record.ScopeInode(s.Scope)
	if err != nil {
		return nil, err
	}
	return OpenNetns(p.Netns, netns.ID{Inode: inode, Cookie: p.Cookie})
}

// State is the state of one slot.
type State struct {
	Slot     int                 `json:"slot"`
	State    string              `json:"state"` // "admitted" or "empty"
	Reason   string              `json:"reason,omitempty"`
	Member   string              `json:"member,omitempty"`   // as configured
	Occupant string              `json:"occupant,omitempty"` // the process in the slot, if it is not the configured member's
	PID      int                 `json:"pid,omitempty"`
	Idle     bool                `json:"idle,omitempty"` // with keep: the process has exited, and its sockets wait for the next one
	Since    time.Time           `json:"since,omitzero"`
	Buckets  int                 `json:"buckets"`
	Verdicts map[string]Verdicts `json:"verdicts"` // by "udp" and "tcp"
	Sockets  []Socket            `json:"sockets,omitempty"`
	Peers    *int                `json:"peers,omitempty"`    // with generations: the member's UDP peers
	Draining *Draining           `json:"draining,omitempty"` // the previous generation

	Exited    bool     `json:"-"`
	Never     bool     `json:"-"` // its configured member was never admitted
	Withdrawn bool     `json:"-"` // by an operator: weir serve does not admit it
	before    []uint64 // open sockets of the previous generation
	Drains    int      `json:"-"` // PID of the previous generation while it drains
}

// Admitted reports whether the slot's traffic reaches a member.
func (s State) Admitted() bool { return s.State == "admitted" }

// Describe describes an empty slot: "slot 0 is empty: …".
func (s State) Describe() string {
	if s.Admitted() {
		return fmt.Sprintf("slot %d: %s", s.Slot, s.Reason)
	}
	return fmt.Sprintf("slot %d is empty: %s", s.Slot, s.Reason)
}

// Same reports whether the slot has the same member, process and sockets in another reading: no command changed it
// between the two.
func (s State) Same(o State) bool {
	return s.State == o.State && s.Withdrawn == o.Withdrawn && s.Exited == o.Exited && s.Member == o.Member &&
		s.PID == o.PID && s.Drains == o.Drains && maps.Equal(s.Cookies(), o.Cookies())
}

// Orphaned reports whether the slot's sockets outlived its process. Traffic still flows, but the slot's new process
// must be recorded.
func (s State) Orphaned(m *service.Member) bool {
	return m != nil && m.Keep && s.PID != 0 && !s.Lives()
}

// Lives reports whether the slot's process is alive.
func (s State) Lives() bool {
	p, err := pidfd.Open(s.PID)
	if err != nil {
		return false
	}
	defer p.Close()
	return p.Alive()
}

// Verdicts counts a slot's decisions: datagrams of UDP, connection attempts of TCP.
type Verdicts struct {
	Steered  uint64 `json:"steered"`  // to the slot's member
	Rejected uint64 `json:"rejected"` // slot empty: reset or unreachable
	Dropped  uint64 `json:"dropped"`  // slot empty: no answer
	Passed   uint64 `json:"passed"`   // slot empty: the kernel's own choice
	Diverted uint64 `json:"diverted"` // slot empty: to another slot's member
	Guests   uint64 `json:"guests"`   // to this slot's member, for other slots
	Failed   uint64 `json:"failed"`   // the kernel rejected the socket
}

// Socket is a required socket of a slot. Queue, Buffer and Drops need permission to enter the namespace.
type Socket struct {
	Listen  string `json:"listen"`
	Cookie  uint64 `json:"cookie"`           // 0: closed or never adopted
	Queue   uint32 `json:"queue"`            // bytes waiting (UDP), connections waiting (TCP)
	Buffer  uint32 `json:"buffer,omitempty"` // bytes (UDP)
	Backlog uint32 `json:"backlog,omitempty"`
	Drops   uint32 `json:"drops"` // by the socket since it was opened
}

// Protocols are the names of the protocols in steer_verdicts, by index.
var Protocols = [2]string{"udp", "tcp"}

// Read evaluates a slot like the program, and reads its counters.
func Read(e *kernel.Opened, p *record.Service, n int) (State, error) {
	out, err := Evaluate(e, p, n)
	if err != nil {
		return out, err
	}
	out.Verdicts = map[string]Verdicts{}
	for i, proto := range Protocols {
		v, err := sumVerdicts(e, p, n, uint32(i))
		if err != nil {
			return out, err
		}
		out.Verdicts[proto] = Verdicts{v.Steered, v.Rejected, v.Dropped, v.Passed, v.Diverted, v.Guests, v.Failed}
	}
	return out, nil
}

// sumVerdicts reads a slot's counters. With generations it adds both rows.
func sumVerdicts(e *kernel.Opened, p *record.Service, n int, proto uint32) (v bpf.SteerVerdicts, err error) {
	if v, err = kernel.SumPerCPU[bpf.SteerVerdicts](e.Maps["verdicts"], p.Row(n)*2+proto); err != nil || n >= len(p.Spare) {
		return v, err
	}
	b, err := kernel.SumPerCPU[bpf.SteerVerdicts](e.Maps["verdicts"], p.Spare[n]*2+proto)
	v.Steered, v.Rejected, v.Dropped, v.Passed = v.Steered+b.Steered, v.Rejected+b.Rejected, v.Dropped+b.Dropped, v.Passed+b.Passed
	v.Diverted, v.Guests, v.Failed = v.Diverted+b.Diverted, v.Guests+b.Guests, v.Failed+b.Failed
	return v, err
}

// Evaluate evaluates a slot like the program.
func Evaluate(e *kernel.Opened, p *record.Service, n int) (State, error) {
	row := p.Row(n)
	out := State{Slot: n, State: "empty"}
	var s bpf.SteerSlot
	if err := e.Maps["slots"].Lookup(row, &s); err != nil {
		return out, err
	}
	member := p.Service.Member(n)
	if member != nil {
		out.Member = member.String()
	}
	var missing []string
	var bound []service.Listen
	if member != nil {
		bound = member.Bound
	}
	eps := p.Service.Endpoints()
	at := service.BoundTo(eps, bound)
	for i, ep := range eps {
		sock := Socket{Listen: ep.String()}
		if err := e.Maps["sockets"].Lookup(row*spec.MaxEndpoints+uint32(s.At[i]), &sock.Cookie); err != nil {
			sock.Cookie = 0
			missing = append(missing, at[i].String())
		}
		out.Sockets = append(out.Sockets, sock)
	}
	out.PID, out.Since = int(s.Tgid), kernel.WallTime(s.Since)
	out.State, out.Reason = evaluate(s, member, missing)
	out.Idle = out.Admitted() && out.Orphaned(member)
	out.Exited = RowState(s.State) == Exited
	out.Never = RowState(s.State) == Empty && member != nil
	out.Withdrawn = RowState(s.State) == Withdrawn
	return out, out.addBefore(e, p)
}

// addBefore adds the state of the slot's other row.
func (s *State) addBefore(e *kernel.Opened, p *record.Service) error {
	d, err := ReadPredecessor(e, p, s.Slot)
	if err != nil || s.Slot >= len(p.Spare) {
		return err
	}
	if d.DrainsFor(p.Row(s.Slot)) && !d.Over() {
		s.Drains = d.Who.PID
	}
	for ep := range uint32(len(p.Service.Endpoints())) {
		var cookie uint64
		if e.Maps["sockets"].Lookup(p.Spare[s.Slot]*spec.MaxEndpoints+ep, &cookie) == nil {
			s.before = append(s.before, cookie)
		}
	}
	return nil
}

// evaluate returns the state of a slot and, if it is empty, the reason.
func evaluate(s bpf.SteerSlot, member *service.Member, missing []string) (state, reason string) {
	who := fmt.Sprintf("process %d", s.Tgid)
	switch RowState(s.State) {
	case Admitted:
		if len(missing) == 0 {
			return "admitted", ""
		}
		return "empty", fmt.Sprintf("%s closed %s", who, strings.Join(missing, ", "))
	case Exited:
		return "empty", who + " exited"
	case Withdrawn:
		return "empty", "withdrawn by weir steer withdraw; weir steer admit admits its member again"
	case Changing:
		return "empty", "its member is being replaced"
	}
	if member == nil {
		return "empty", "no member is configured"
	}
	if member.Ready != nil {
		return "empty", fmt.Sprintf("%s was never ready with all its sockets", member)
	}
	return "empty", fmt.Sprintf("%s never had all its sockets", member)
}

// NarrowedSince returns the reason if a socket no longer receives all traffic of its slot, or "".
func NarrowedSince(pid int, ep service.Endpoint, cookie uint64, sk sockdiag.Socket, listed bool) string {
	switch {
	case cookie == 0:
	case !listed && ep.Proto == unix.IPPROTO_UDP:
		return fmt.Sprintf("process %d has connected its socket for %s since its admission: it receives from its peer only, and other datagrams are lost: leave it unconnected", pid, ep)
	case listed && sk.Interface != 0:
		return fmt.Sprintf("process %d has bound its socket for %s to an interface since its admission, but gets packets of all interfaces: remove the binding", pid, ep)
	}
	return ""
}

// Tells reports whether the slot's own reason already covers why: the process exited, or closed the missing sockets.
func (s State) Tells(why string) bool {
	if s.Exited {
		return strings.Contains(why, "has exited")
	}
	_, lacks, found := strings.Cut(why, service.ErrNoSocket.Error()+": ")
	_, closed, _ := strings.Cut(s.Reason, " closed ")
	return !s.Never && found && lacks == closed
}
