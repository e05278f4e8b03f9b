// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Scope is the pin directory of the service's namespace: its inode number.
func (s *Service) Scope() string { return s.PinScope }

// State is what the pins say of steering on this host.
type State struct {
	Services []Service  `json:"services"`
	Bound    []Bindings `json:"bound,omitempty"`    // namespaces in which something is bound
	Outdated []Outdated `json:"outdated,omitempty"` // what weir upgrade would do

	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	Root *kernel.Root `json:"-"`
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// Failures implements feature.Failing: services whose engine, hook, copies or socket holder are missing.
func (st State) Failures() (out []feature.Finding) {
	for i := range st.Services {
		if s := &st.Services[i]; s.Fails() {
			out = append(out, feature.Failure(s.Name, s.Problem, ""))
		}
	}
	return out
}

// Fails reports whether the service's Problem is a failure. The others are what a reader may not see.
func (s *Service) Fails() bool {
	switch s.Problem {
	case ProblemEngine, ProblemSocketHolder, engine.ProblemBind, engine.ProblemCopy:
		return true
	}
	return false
}

// Err is about the instances that cannot be read, nil where there are none.
func (st State) Err() error { return st.Unreadable.WithoutDamage().Err() }

// Reads tells whether the engine of a namespace can be read, or is not there.
func (st State) Reads(scope string, kind spec.Engine) bool {
	return !st.Unreadable.Has(record.EngineInstance(scope, kind))
}

// Service is one steered service.
type Service struct {
	Name              string               `json:"name"`
	Netns             string               `json:"netns"`
	Inode             uint64               `json:"netns_inode"`
	Listen            []string             `json:"listen"`
	By                spec.Policy          `json:"by"`
	Engine            spec.Engine          `json:"engine"`
	EngineReason      string               `json:"engine_reason,omitempty"` // why this engine
	Seed              uint32               `json:"seed"`
	Buckets           int                  `json:"buckets"`
	OnEmpty           spec.OnEmpty         `json:"on_empty"`
	Slots             []slots.State        `json:"slots"`
	Weights           spec.Weights         `json:"weights,omitempty"`
	Drained           []int                `json:"drained,omitempty"`  // slots without buckets for now
	Moved             map[string]int       `json:"moved,omitempty"`    // devices moved by hand, to slot
	Placed            map[int]int          `json:"placed,omitempty"`   // buckets moved by hand, to slot
	DevicesFile       string               `json:"devices,omitempty"`  // the file that names the devices
	Bypassed          bool                 `json:"bypassed,omitempty"` // no packet is steered
	MisplacedSessions *int                 `json:"misplaced_sessions,omitempty"`
	Shared            *engine.Shared       `json:"share_port,omitempty"`
	SharedAt          []hookorder.Position `json:"share_port_positions,omitempty"` // of its programs at the root of the cgroups
	Copies            *engine.Copies       `json:"copy,omitempty"`
	Problem           string               `json:"problem,omitempty"`  // what is wrong with the service as a whole
	Position          *hookorder.Position  `json:"position,omitempty"` // engine sk_lookup: of its program in the namespace
	Updated           time.Time            `json:"updated"`
	PinScope          string               `json:"-"` // directory of its namespace
	Record            *record.Service      `json:"-"` // what plans compare with
	Table             []uint16             `json:"-"` // bucket to slot
	Endpoints         []service.Endpoint   `json:"-"` // what each slot's sockets serve

	DeviceList *spec.DeviceList     `json:"-"` // by: device
	Others     [][]service.Endpoint `json:"-"` // of the namespace's other services
	Root       *kernel.Root         `json:"-"`

	Collapsed bool `json:"-"` // doctor: everything comes from one source
}

// ProblemEngine is the Problem of a service that nothing steers.
const ProblemEngine = "its engine is missing: weir apply recovers it"

// problemUnread is the Problem of a service whose engine cannot be read.
func problemUnread(err error) string {
	return "it stays as it is, for its engine cannot be read: " + err.Error()
}

// ProblemSocketHolder is the Problem of a service whose empty slots cannot drop.
const ProblemSocketHolder = "its holder is gone (weir steer hold), which on_empty: drop and engine sk_reuseport need: weir apply and weir serve start it again"

// Service returns the state of one service, the only one if name is empty.
func (st State) Service(name string) (*Service, error) {
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

// addPosition reads where the program that steers is among those of the namespace's sk_lookup. Other users
// may not see it.
func (s *Service) addPosition(e *kernel.Opened) {
	if s.Engine != spec.EngineSkLookup {
		return
	}
	ns, err := s.OpenNetns()
	if err != nil {
		return
	}
	defer ns.Close()
	ln, err := e.Link("lookup")
	if err != nil {
		return
	}
	defer ln.Close()
	if p, ok, err := kernel.PositionAt(kernel.NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}, ln); err == nil && ok {
		s.Position = &p
	}
}

// Positions are those of the service's programs at their hooks: of sk_lookup and of share_port.
func (s *Service) Positions() (out []hookorder.Position) {
	if s.Position != nil {
		out = append(out, *s.Position)
	}
	return append(out, s.SharedAt...)
}

// addQueues asks sock_diag for queues, buffers and drops of the sockets. It
// needs root where the namespace is not the reader's own: without, they are 0.
func (s *Service) addQueues() {
	ns, err := s.OpenNetns()
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
				slot.Reason = slots.NarrowedSince(slot.PID, s.Endpoints[j], sock.Cookie, sk, ok)
			}
			if !ok {
				continue
			}
			sock.Queue, sock.Drops = sk.RecvQueue, sk.Mem.Drops
			if s.Endpoints[j].Proto == unix.IPPROTO_UDP {
				sock.Buffer = sk.Mem.RcvBuf
			} else {
				sock.Backlog = sk.SendQueue
			}
		}
	}
}
