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

// Scope returns the pin directory of the service's namespace: its inode number.
func (s *Service) Scope() string { return s.PinScope }

// State is the state of steering on this host.
type State struct {
	Services []Service  `json:"services"`
	Bound    []Bindings `json:"bound,omitempty"`    // namespaces with bindings
	Outdated []Outdated `json:"outdated,omitempty"` // engines that weir upgrade would change

	Unreadable instances.Unreadable `json:"unreadable,omitempty"`

	Root *kernel.Root `json:"-"`
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// Failures implements feature.Failing. It returns the services without their engine, hook, copies or socket holder.
func (st State) Failures() (out []feature.Finding) {
	for i := range st.Services {
		if s := &st.Services[i]; s.Fails() {
			out = append(out, feature.Failure(s.Name, s.Problem, ""))
		}
	}
	return out
}

// Fails reports whether the service's Problem is a failure. Other Problems are data that the reader has no permission
// for.
func (s *Service) Fails() bool {
	switch s.Problem {
	case ProblemEngine, ProblemSocketHolder, engine.ProblemBind, engine.ProblemCopy:
		return true
	}
	return false
}

// Err returns an error about the unreadable instances, or nil.
func (st State) Err() error { return st.Unreadable.WithoutDamage().Err() }

// Reads reports whether the engine of a namespace is readable or does not exist.
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
	EngineReason      string               `json:"engine_reason,omitempty"` // reason of the choice
	Seed              uint32               `json:"seed"`
	Buckets           int                  `json:"buckets"`
	OnEmpty           spec.OnEmpty         `json:"on_empty"`
	Slots             []slots.State        `json:"slots"`
	Weights           spec.Weights         `json:"weights,omitempty"`
	Drained           []int                `json:"drained,omitempty"`  // slots without buckets for now
	Moved             map[string]int       `json:"moved,omitempty"`    // devices moved by an operator, to slot
	Placed            map[int]int          `json:"placed,omitempty"`   // buckets moved by an operator, to slot
	DevicesFile       string               `json:"devices,omitempty"`  // devices file
	Bypassed          bool                 `json:"bypassed,omitempty"` // no packet is steered
	MisplacedSessions *int                 `json:"misplaced_sessions,omitempty"`
	Shared            *engine.Shared       `json:"share_port,omitempty"`
	SharedAt          []hookorder.Position `json:"share_port_positions,omitempty"` // of the share_port programs at the root cgroup
	Copies            *engine.Copies       `json:"copy,omitempty"`
	Problem           string               `json:"problem,omitempty"`  // of the service as a whole
	Position          *hookorder.Position  `json:"position,omitempty"` // of the sk_lookup program in the namespace
	Updated           time.Time            `json:"updated"`
	PinScope          string               `json:"-"` // pin directory of its namespace
	Record            *record.Service      `json:"-"` // for plans to compare with
	Table             []uint16             `json:"-"` // bucket to slot
	Endpoints         []service.Endpoint   `json:"-"` // of each slot's sockets

	DeviceList *spec.DeviceList     `json:"-"` // by: device
	Others     [][]service.Endpoint `json:"-"` // of the namespace's other services
	Root       *kernel.Root         `json:"-"`

	Collapsed bool `json:"-"` // doctor: all traffic comes from one source
}

// ProblemEngine is the Problem of a service without its engine.
const ProblemEngine = "its engine is missing: weir apply recovers it"

// problemUnread returns the Problem of a service with an unreadable engine.
func problemUnread(err error) string {
	return "its engine is unreadable, so it stays unchanged: " + err.Error()
}

// ProblemSocketHolder is the Problem of a service without its socket holder.
const ProblemSocketHolder = "its socket holder (weir steer hold) is not running, needed for on_empty: drop and engine sk_reuseport: run weir apply or weir serve"

// Service returns the state of one service. An empty name selects the only service.
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
		return nil, fmt.Errorf("no service has slots: weir steer services shows services with bindings only")
	case len(names) == 0:
		return nil, fmt.Errorf("no service is steered: weir apply -f weir.yaml")
	case name == "":
		return nil, fmt.Errorf("several services are steered (%s): name one with --service", strings.Join(names, ", "))
	}
	if len(st.Bound) > 0 {
		return nil, fmt.Errorf("service %q does not exist or has no slots (services with slots: %s): weir steer services shows services with bindings only", name, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("service %q is not steered (steered: %s)", name, strings.Join(names, ", "))
}

// addPosition reads the position of the steering program among the sk_lookup programs of the namespace. It needs
// permission.
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

// Positions returns the positions of the service's sk_lookup and share_port programs at their hooks.
func (s *Service) Positions() (out []hookorder.Position) {
	if s.Position != nil {
		out = append(out, *s.Position)
	}
	return append(out, s.SharedAt...)
}

// addQueues reads queues, buffers and drops of the sockets from sock_diag. In a foreign namespace it needs root.
// Without, they are 0.
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
