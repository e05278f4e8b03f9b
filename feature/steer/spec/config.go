// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"encoding"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/service"
)

// Config is the steering part of a host's configuration.
type Config struct {
	Services []Service
	Rate     *Rate `json:",omitempty"` // of resets after this change; nil: each service's reset_rate
}

// Service is one steered service.
type Service struct {
	service.Spec
	Options
}

// Options is the steer section of a service.
type Options struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	By             Policy       `yaml:"by" json:"by"`
	Slots          int          `yaml:"slots" json:"slots"`       // 1 to MaxSlots
	Engine         Engine       `yaml:"engine" json:"engine"`     // hook of the decision
	OnEmpty        OnEmpty      `yaml:"on_empty" json:"on_empty"` // action of a slot without a complete member
	Seed           *uint32      `yaml:"seed" json:"seed"`         // of the hash; nil: drawn once, then kept
	Backlog        *int         `yaml:"backlog" json:"backlog"`   // minimum for adopted listeners; 0 leaves them unchanged
	ReceiveBuffer  *int         `yaml:"receive_buffer" json:"receive_buffer"`
	Templates      Templates    `yaml:"templates" json:"templates,omitempty"`         // of IPFIX and NetFlow v9: keep and replay
	Foreign        Foreign      `yaml:"foreign" json:"foreign,omitempty"`             // sk_reuseport: action on a foreign program
	Migrate        bool         `yaml:"migrate" json:"migrate,omitempty"`             // sk_reuseport: a closing listener's queue goes to another member
	SharePort      bool         `yaml:"share_port" json:"share_port,omitempty"`       // set SO_REUSEPORT on every socket that binds its ports
	Devices        string       `yaml:"devices" json:"devices,omitempty" path:"file"` // by: device: file of device names; relative to the configuration
	Copy           string       `yaml:"copy" json:"copy,omitempty"`                   // service to copy every datagram to
	QUIC           *QUIC        `yaml:"quic" json:"quic,omitempty"`                   // by: quic
	Weights        Weights      `yaml:"weights" json:"weights,omitempty"`             // by slot; default 1
	Generations    *Generations `yaml:"generations" json:"generations,omitempty"`     // nil: a slot's next member replaces the previous one at once
	ResetRate      *Rate        `yaml:"reset_rate" json:"reset_rate,omitempty"`       // of misplaced sessions
}

// Defaults of omitted options. nfacctd listens with a backlog of 1 and silently loses most of a reconnect storm. The
// kernel's default receive buffer holds about 200 datagrams.
const (
	defaultBacklog       = 1024
	defaultReceiveBuffer = 8 << 20 // bytes
)

// Policy names the part of a packet that selects its bucket.
type Policy string

// BySource assigns all protocols of a source address to one slot.
const (
	BySource Policy = "source"
	ByQUIC   Policy = "quic"
)

// Engine names the hook that decides.
type Engine string

// Engines.
const (
	EngineAuto      Engine = "auto"
	EngineSkLookup  Engine = "sk_lookup"    // decides at every socket lookup of the namespace
	EngineReuseport Engine = "sk_reuseport" // decides among the sockets that share the service's port
)

// Foreign is the action on a foreign program in a reuseport group. Collectors with their own balancer attach one.
type Foreign string

// Actions on a foreign program.
const (
	ForeignRefuse  Foreign = "refuse" // the member is not admitted, with the reason
	ForeignReplace Foreign = "replace"
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *Foreign) UnmarshalText(b []byte) error {
	return strictyaml.Choice(f, b, "foreign", ForeignRefuse, ForeignReplace)
}

// OnEmpty is the action on traffic of a slot without a complete member.
type OnEmpty string

// Actions of an empty slot.
const (
	Reject OnEmpty = "reject" // TCP reset, ICMP port unreachable
	Drop   OnEmpty = "drop"   // no answer
	Next   OnEmpty = "next"   // another slot's member, the same for all protocols of a source
	Pass   OnEmpty = "pass"   // the kernel's own choice
)

// OnEmptyCodes are the values of on_empty, indexed by enum steer_on_empty.
var OnEmptyCodes = []OnEmpty{Reject, Drop, Next, Pass}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Policy) UnmarshalText(b []byte) error { return strictyaml.Choice(p, b, "policy", Policies...) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (e *Engine) UnmarshalText(b []byte) error {
	return strictyaml.Choice(e, b, "engine", EngineAuto, EngineSkLookup, EngineReuseport)
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *OnEmpty) UnmarshalText(b []byte) error {
	return strictyaml.Choice(o, b, "on_empty", Reject, Drop, Next, Pass)
}

var _, _, _ encoding.TextUnmarshaler = (*Policy)(nil), (*Engine)(nil), (*OnEmpty)(nil)

// WithDefaults returns s with defaults for the omitted options.
func (s Service) WithDefaults() Service {
	if s.By == "" {
		s.By = BySource
	}
	if s.Engine == "" {
		s.Engine = EngineAuto
	}
	if s.OnEmpty == "" {
		s.OnEmpty = s.By.onEmpty()
	}
	if s.Foreign == "" {
		s.Foreign = ForeignRefuse
	}
	if s.Templates == "" {
		s.Templates = TemplatesAuto
	}
	s = s.policyDefaults()
	s.Generations = s.Generations.withDefaults()
	if s.Slots == 0 {
		for _, m := range s.Members {
			s.Slots = max(s.Slots, m.Slot+1)
		}
	}
	if s.Backlog == nil {
		s.Backlog = new(int)
		*s.Backlog = defaultBacklog
	}
	if s.ReceiveBuffer == nil {
		s.ReceiveBuffer = new(int)
		*s.ReceiveBuffer = defaultReceiveBuffer
	}
	return s
}

// Validate checks the configuration and fills in defaults. Errors carry their position in the file.
func (c *Config) Validate() []error {
	var errs []error
	for i := range c.Services {
		c.Services[i] = c.Services[i].WithDefaults()
		s := c.Services[i]
		fail := func(format string, a ...any) {
			errs = append(errs, s.Options.Pos.Errorf("services.%s.steer: "+format, append([]any{s.Name}, a...)...))
		}
		if s.Slots == 0 {
			fail("no slots: set their number, like slots: 4, name members, or remove the service")
		} else if s.Slots < 1 || s.Slots > MaxSlots {
			fail("slots %d: want a number from 1 to %d", s.Slots, MaxSlots)
		}
		if n := len(s.Endpoints()); n > MaxEndpoints {
			fail("its listens need %d sockets per slot (one per family), the maximum is %d: name families (udp4, tcp6) or split the service", n, MaxEndpoints)
		}
		if err := s.CheckReuseport(); s.Engine == EngineReuseport && err != nil {
			fail("engine sk_reuseport: %v", err)
		}
		if *s.Backlog < 0 || *s.Backlog > 65535 {
			fail("backlog %d: want a number from 0 to 65535", *s.Backlog)
		}
		if *s.ReceiveBuffer < 0 || *s.ReceiveBuffer > 1<<30 {
			fail("receive_buffer %d: want bytes, from 0 to %d", *s.ReceiveBuffer, 1<<30)
		}
		if problem := s.checkTemplates(); problem != "" {
			fail("%s", problem)
		}
		s.validatePolicy(fail)
		s.validateGenerations(fail)
		slots := s.Slots
		if slots < 1 || slots > MaxSlots {
			slots = 0
		}
		errs = append(errs, s.Spec.Validate(slots)...)
		errs = append(errs, Overlaps(c.Services[:i], s)...)
	}
	for _, s := range c.Services {
		if problem := checkCopy(s, c.Services); problem != "" {
			errs = append(errs, s.Options.Pos.Errorf("services.%s.steer: %s", s.Name, problem))
		}
	}
	return errs
}

// Overlaps reports conflicts of s with other services of its namespace: the same packets belong to both. Different
// names of one namespace are detected at apply.
func Overlaps(others []Service, s Service) []error {
	var errs []error
	for _, o := range others {
		if o.Netns != s.Netns {
			continue
		}
		told := map[int]bool{} // a wildcard listen has one endpoint per family
		for _, e := range s.Endpoints() {
			for _, f := range o.Endpoints() {
				if e.Overlaps(f) && !told[e.Listen] {
					told[e.Listen] = true
					errs = append(errs, s.Spec.Pos.Errorf("services.%s: %q already belongs to service %s: change the address or port of one of them", s.Name, s.Listen[e.Listen], o.Name))
				}
			}
		}
	}
	return errs
}
