// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// State is what the pins say of steering on this host.
type State struct {
	Services []ServiceState  `json:"services"`
	Bound    []DispatchState `json:"bound,omitempty"`    // namespaces in which something is bound
	Outdated []Outdated      `json:"outdated,omitempty"` // what weir upgrade would do

	root *kernel.Root
}

// ServiceState is one steered service.
type ServiceState struct {
	Name              string             `json:"name"`
	Netns             string             `json:"netns"`
	Inode             uint64             `json:"netns_inode"`
	Listen            []string           `json:"listen"`
	By                Policy             `json:"by"`
	Engine            Engine             `json:"engine"`
	Why               string             `json:"engine_why,omitempty"` // why this engine
	Seed              uint32             `json:"seed"`
	Buckets           int                `json:"buckets"`
	OnEmpty           OnEmpty            `json:"on_empty"`
	Slots             []SlotState        `json:"slots"`
	Weights           Weights            `json:"weights,omitempty"`
	Drained           []int              `json:"drained,omitempty"`  // slots without buckets for now
	Moved             map[string]int     `json:"moved,omitempty"`    // devices moved by hand, to slot
	Placed            map[int]int        `json:"placed,omitempty"`   // buckets moved by hand, to slot
	DevicesFile       string             `json:"devices,omitempty"`  // the file that names the devices
	Bypassed          bool               `json:"bypassed,omitempty"` // no packet is steered
	MisplacedSessions *int               `json:"misplaced_sessions,omitempty"`
	Shared            *Shared            `json:"share_port,omitempty"`
	Copies            *Copies            `json:"copy,omitempty"`
	Problem           string             `json:"problem,omitempty"` // what is wrong with the service as a whole
	Updated           time.Time          `json:"updated"`
	scope             string             // directory of its namespace
	pub               *published         // what plans compare with
	table             []uint16           // bucket to slot
	eps               []service.Endpoint // what each slot's sockets serve

	devices *DeviceList          // by: device
	others  [][]service.Endpoint // of the namespace's other services
	root    *kernel.Root

	collapsed bool // doctor: everything comes from one source
}

// SlotState is one slot of a service.
type SlotState struct {
	Slot     int                 `json:"slot"`
	State    string              `json:"state"` // "admitted" or "empty"
	Reason   string              `json:"reason,omitempty"`
	Member   string              `json:"member,omitempty"` // that the configuration names
	Holder   string              `json:"holder,omitempty"` // the process that has the slot, if it is not the configured member's
	PID      int                 `json:"pid,omitempty"`
	Since    time.Time           `json:"since,omitzero"`
	Buckets  int                 `json:"buckets"`
	Verdicts map[string]Verdicts `json:"verdicts"` // by "udp" and "tcp"
	Sockets  []SocketState       `json:"sockets,omitempty"`
	Peers    *int                `json:"peers,omitempty"`    // with generations: UDP peers that the member has
	Draining *Draining           `json:"draining,omitempty"` // the generation before

	exited    bool
	never     bool     // its configured member was never seen
	withdrawn bool     // by an operator: the watcher leaves it alone
	before    []uint64 // sockets of the generation before, while they are open
	drains    int      // the process of the generation before, while the kernel gives it packets
}

// Admitted says whether the slot's traffic reaches a member.
func (s SlotState) Admitted() bool { return s.State == "admitted" }

// Describe says what is wrong with a slot: "slot 0 is empty: …".
func (s SlotState) Describe() string {
	if s.Admitted() {
		return fmt.Sprintf("slot %d: %s", s.Slot, s.Reason)
	}
	return fmt.Sprintf("slot %d is empty: %s", s.Slot, s.Reason)
}

// outlived says that the slot's sockets outlived the process that it was given
// to: its successor is to be named, though traffic needs nobody.
func (s SlotState) outlived(m *service.Member) bool {
	if m == nil || !m.Keep || s.PID == 0 {
		return false
	}
	p, err := pidfd.Open(s.PID)
	if err != nil {
		return true
	}
	defer p.Close()
	return !p.Alive()
}

// Verdicts counts what happened to a slot's traffic: datagrams of UDP,
// connection attempts of TCP.
type Verdicts struct {
	Steered  uint64 `json:"steered"`  // to the slot's member
	Rejected uint64 `json:"rejected"` // slot empty: reset or unreachable
	Dropped  uint64 `json:"dropped"`  // slot empty: silence
	Passed   uint64 `json:"passed"`   // slot empty: the kernel's own choice
	Diverted uint64 `json:"diverted"` // slot empty: to another slot's member
	Guests   uint64 `json:"guests"`   // to this member, from other slots
	Failed   uint64 `json:"failed"`   // the kernel refused the socket
}

// SocketState is one socket that a slot requires. Queue, Buffer and Drops need
// the right to look into the namespace.
type SocketState struct {
	Listen  string `json:"listen"`
	Cookie  uint64 `json:"cookie"`           // 0: closed or never adopted
	Queue   uint32 `json:"queue"`            // bytes waiting (UDP), connections waiting (TCP)
	Buffer  uint32 `json:"buffer,omitempty"` // bytes (UDP)
	Backlog uint32 `json:"backlog,omitempty"`
	Drops   uint32 `json:"drops"` // by the socket since it was opened
}

// problemEngine is the Problem of a service that nothing steers.
const problemEngine = "its engine is missing: weir apply mends it"

// problemHolder is the Problem of a service whose empty slots cannot drop.
const problemHolder = "its holder is gone (weir steer hold), which on_empty: drop and engine sk_reuseport need: weir apply and weir serve start it again"

// protocols are the columns of steer_verdicts.
var protocols = [2]string{"udp", "tcp"}

// Service returns the state of one service, the only one if name is empty.
func (st State) Service(name string) (*ServiceState, error) {
	var names []string
	for i := range st.Services {
		if s := &st.Services[i]; s.Name == name || name == "" && len(st.Services) == 1 {
			return s, nil
		}
		names = append(names, st.Services[i].Name)
	}
	switch {
	case len(names) == 0 && len(st.Bound) > 0:
		return nil, fmt.Errorf("no service has slots: those that are only bound are shown by weir steer services")
	case len(names) == 0:
		return nil, fmt.Errorf("no service is steered: weir apply -f weir.yaml")
	case name == "":
		return nil, fmt.Errorf("several services are steered (%s): name one with --service", strings.Join(names, ", "))
	}
	if len(st.Bound) > 0 {
		return nil, fmt.Errorf("no service %q has slots; there is %s; those that are only bound are shown by weir steer services", name, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("no service %q is steered; there is %s", name, strings.Join(names, ", "))
}

// readSlot judges a slot as the program does, and reads its counters.
func readSlot(e *kernel.Opened, p *published, n int) (SlotState, error) {
	out, err := judgeSlot(e, p, n)
	if err != nil {
		return out, err
	}
	out.Verdicts = map[string]Verdicts{}
	for i, proto := range protocols {
		v, err := sumVerdicts(e, p, n, uint32(i))
		if err != nil {
			return out, err
		}
		out.Verdicts[proto] = Verdicts{v.Steered, v.Rejected, v.Dropped, v.Passed, v.Diverted, v.Guests, v.Failed}
	}
	return out, nil
}

// sumVerdicts reads a slot's counters: with generations, those of both its rows.
func sumVerdicts(e *kernel.Opened, p *published, n int, proto uint32) (v bpf.SteerVerdicts, err error) {
	if v, err = kernel.SumPerCPU[bpf.SteerVerdicts](e.Maps["verdicts"], p.row(n)*2+proto); err != nil || n >= len(p.Spare) {
		return v, err
	}
	b, err := kernel.SumPerCPU[bpf.SteerVerdicts](e.Maps["verdicts"], p.Spare[n]*2+proto)
	v.Steered, v.Rejected, v.Dropped, v.Passed = v.Steered+b.Steered, v.Rejected+b.Rejected, v.Dropped+b.Dropped, v.Passed+b.Passed
	v.Diverted, v.Guests, v.Failed = v.Diverted+b.Diverted, v.Guests+b.Guests, v.Failed+b.Failed
	return v, err
}

// judgeSlot judges a slot as the program does.
func judgeSlot(e *kernel.Opened, p *published, n int) (SlotState, error) {
	row := p.row(n)
	out := SlotState{Slot: n, State: "empty"}
	var s bpf.SteerSlot
	if err := e.Maps["slots"].Lookup(row, &s); err != nil {
		return out, err
	}
	member := p.Service.Member(n)
	if member != nil {
		out.Member = member.String()
	}
	var missing []string
	for i, ep := range p.Service.Endpoints() {
		sock := SocketState{Listen: ep.String()}
		if err := e.Maps["sockets"].Lookup(row*maxEndpoints+uint32(s.At[i]), &sock.Cookie); err != nil {
			sock.Cookie = 0
			missing = append(missing, ep.String())
		}
		out.Sockets = append(out.Sockets, sock)
	}
	out.PID, out.Since = int(s.Tgid), kernel.WallTime(s.Since)
	out.State, out.Reason = judge(s, member, missing)
	out.exited = slotState(s.State) == stateExited
	out.never = slotState(s.State) == stateEmpty && member != nil
	out.withdrawn = slotState(s.State) == stateWithdrawn
	return out, out.addBefore(e, p)
}

// addBefore tells of the slot's other row.
func (s *SlotState) addBefore(e *kernel.Opened, p *published) error {
	d, err := readDrain(e, p, s.Slot)
	if err != nil || s.Slot >= len(p.Spare) {
		return err
	}
	if d.is(p.row(s.Slot)) && !d.over() {
		s.drains = d.who.pid
	}
	for ep := range uint32(len(p.Service.Endpoints())) {
		var cookie uint64
		if e.Maps["sockets"].Lookup(p.Spare[s.Slot]*maxEndpoints+ep, &cookie) == nil {
			s.before = append(s.before, cookie)
		}
	}
	return nil
}

// judge says what a slot is and, if it is empty, why.
func judge(s bpf.SteerSlot, member *service.Member, missing []string) (state, reason string) {
	who := fmt.Sprintf("process %d", s.Tgid)
	switch slotState(s.State) {
	case stateAdmitted:
		if len(missing) == 0 {
			return "admitted", ""
		}
		return "empty", fmt.Sprintf("%s closed %s", who, strings.Join(missing, ", "))
	case stateExited:
		return "empty", who + " exited"
	case stateWithdrawn:
		return "empty", "withdrawn by weir steer unregister; weir steer register gives it its member again"
	case stateChanging:
		return "empty", "its member is being replaced"
	}
	if member == nil {
		return "empty", "no member is configured"
	}
	if member.Ready != nil {
		return "empty", fmt.Sprintf("%s was never seen with all its sockets and ready", member)
	}
	return "empty", fmt.Sprintf("%s was never seen with all its sockets", member)
}

// narrowedSince says why a socket does not take what its slot gives it any more.
func narrowedSince(pid int, ep service.Endpoint, cookie uint64, sk sockdiag.Socket, listed bool) string {
	switch {
	case cookie == 0:
	case !listed && ep.Proto == unix.IPPROTO_UDP:
		return fmt.Sprintf("process %d has connected its socket for %s since it was admitted: it takes datagrams of its peer alone, and all others are lost: leave it unconnected", pid, ep)
	case listed && sk.Interface != 0:
		return fmt.Sprintf("process %d has bound its socket for %s to an interface since it was admitted, and gets what arrives elsewhere as well: bind it to none", pid, ep)
	}
	return ""
}

// addQueues asks sock_diag for queues, buffers and drops of the sockets. It
// needs root where the namespace is not the reader's own: without, they are 0.
func (s *ServiceState) addQueues() {
	ns, err := s.openNetns()
	if err != nil {
		s.Problem = fmt.Sprintf("queues and drops are not shown: %v", err)
		return
	}
	defer ns.Close()
	byCookie := map[uint64]sockdiag.Socket{}
	err = ns.Do(func() error {
		for _, q := range []sockdiag.Query{
			{Proto: unix.IPPROTO_TCP, States: 1 << unix.BPF_TCP_LISTEN},
			{Proto: unix.IPPROTO_UDP, States: 1 << unix.BPF_TCP_CLOSE},
		} {
			socks, err := sockdiag.Dump(q)
			if err != nil {
				return err
			}
			for _, sk := range socks {
				byCookie[sk.Cookie] = sk
			}
		}
		return nil
	})
	if err != nil {
		s.Problem = fmt.Sprintf("queues and drops are not shown: %v", err)
	}
	for i := range s.Slots {
		for j := range s.Slots[i].Sockets {
			sock := &s.Slots[i].Sockets[j]
			sk, ok := byCookie[sock.Cookie]
			if slot := &s.Slots[i]; err == nil && slot.Admitted() && slot.Reason == "" {
				slot.Reason = narrowedSince(slot.PID, s.eps[j], sock.Cookie, sk, ok)
			}
			if !ok {
				continue
			}
			sock.Queue, sock.Drops = sk.RecvQueue, sk.Mem.Drops
			if s.eps[j].Proto == unix.IPPROTO_UDP {
				sock.Buffer = sk.Mem.RcvBuf
			} else {
				sock.Backlog = sk.SendQueue
			}
		}
	}
}
