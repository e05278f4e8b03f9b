// SPDX-License-Identifier: Apache-2.0

// Package peers runs the real software that experiments meet: collectors (pmacct's nfacctd), routers (FRR's
// bgpd with its BMP module) and IPFIX exporters (pmacct's nfprobe, softflowd), all unmodified.
package peers

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/weir-project/weir/lab"
)

// Collector is one collector of pmacct's, and its restarts: an nfacctd that takes IPFIX and BMP on one port, or
// an sfacctd that takes sFlow. All collectors of an experiment may share the port: they set SO_REUSEPORT.
type Collector struct {
	Number   int
	PIDFile  string // of the core process, written when it is started
	Port     int
	MaxPeers int      // BMP sessions it has memory for, 2 MB each
	Env      []string // added to its environment
	Buffer   int      // between core and plugin, in bytes; 0 is nfacctd's default
	Proxied  bool     // BMP comes through a proxy that says first whom it is from (PROXY protocol)
	Bound    []string // where it is bound, as weir.yaml has it, if not where its service listens

	program string
	binary  string // of goflow2, which no package installs
	family  Family // of a sink
	group   string // of sinks: before their program in names
	env     *lab.Env
	ns      string
	dir     string

	mu    sync.Mutex
	lives []*life
}

// life is one process and its output. Only Poll reads the output, and only from one goroutine.
type life struct {
	number          int // from 1
	proc            *lab.Process
	flows, bmp, log tail
	nfcapd          nfcapdFiles
	killed          atomic.Int64 // bytes of log when it was killed, -1 before; what plugins say later is their last words
	crashed         bool         // it ended unbidden, and that was reported
	ready           readiness
}

// now is the latest life, nil before the first Start.
func (c *Collector) now() *life {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.lives) == 0 {
		return nil
	}
	return c.lives[len(c.lives)-1]
}

// NewCollector prepares nfacctd number n in the namespace, without starting it.
func NewCollector(e *lab.Env, namespace string, n, port, maxPeers int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, MaxPeers: maxPeers, program: "nfacctd", ns: namespace})
}

// NewSink prepares a built-in collector, for where nfacctd cannot be installed.
func NewSink(e *lab.Env, namespace string, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, program: "sink", family: DualStack, ns: namespace})
}

// NewFamilySink prepares a built-in collector of one family, or both; group tells sinks of one number apart.
func NewFamilySink(e *lab.Env, namespace, group string, family Family, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, group: group, program: "sink", family: family, ns: namespace})
}

// NewSFlowCollector prepares sfacctd number n, likewise.
func NewSFlowCollector(e *lab.Env, namespace string, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, program: "sfacctd", ns: namespace})
}

func newCollector(e *lab.Env, c *Collector) (*Collector, error) {
	name := c.program
	if c.group != "" {
		name = c.group + "-" + name
	}
	c.env, c.dir = e, filepath.Join(e.Dir, fmt.Sprintf("%s-%d", name, c.Number))
	c.PIDFile = filepath.Join(c.dir, c.program+".pid")
	return c, os.MkdirAll(c.dir, 0o755)
}

// String names the collector: "nfacctd 2", "v4 sink 2".
func (c *Collector) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %d", c.group, c.program, c.Number))
}

// path is that of an output file: one set for each life, so that the last words of a killed process do not
// run into the first of its successor.
func (c *Collector) path(name string, life int) string {
	return filepath.Join(c.dir, fmt.Sprintf("%s-%d.json", name, life))
}

// configuration is what an operator would write. Without an address nfacctd listens on [::], for both families.
func (c *Collector) configuration(life int) string {
	lines := []string{
		"daemonize: false",
		fmt.Sprintf("%s_port: %d", c.program, c.Port),
		c.program + "_time_new: true",
		c.program + "_disable_checks: false", // sequence numbers are checked, gaps logged
		c.program + "_pipe_size: 4194304",
		"plugins: print[p]",
		"aggregate[p]: peer_src_ip, in_iface",
		// pmacct's own queue between core and plugin hands a buffer over twice when the core is preempted
		// between marking it as written and looking whether the plugin sleeps; ZeroMQ does not.
		"plugin_pipe_zmq[p]: true",
		"print_refresh_time[p]: 1",
		"print_output[p]: json",
		"print_output_file[p]: " + c.path("flows", life),
		"print_output_file_append[p]: true",
	}
	if c.program == "nfacctd" {
		lines = append(lines, "bmp_daemon: true",
			fmt.Sprintf("bmp_daemon_port: %d", c.Port),
			fmt.Sprintf("bmp_daemon_max_peers: %d", c.MaxPeers),
			"bmp_daemon_msglog_file: "+c.path("bmp", life))
		if c.Proxied {
			lines = append(lines, "bmp_daemon_parse_proxy_header: true")
		}
	}
	if c.Buffer > 0 {
		lines = append(lines, fmt.Sprintf("plugin_buffer_size[p]: %d", c.Buffer))
	}
	return strings.Join(lines, "\n") + "\n"
}

// Start starts the process; its sockets appear some seconds later.
func (c *Collector) Start() error {
	n := c.Life() + 1
	conf := filepath.Join(c.dir, c.program+".conf")
	if err := os.WriteFile(conf, []byte(c.configuration(n)), 0o644); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(c.dir, fmt.Sprintf("log-%d", n)))
	if err != nil {
		return err
	}
	defer log.Close()
	command := lab.Command{
		Namespace: c.ns, Path: c.program, Args: []string{"-f", conf}, Dir: c.dir, Output: log,
		Env: append([]string{"MALLOC_TOP_PAD_=67108864"}, c.Env...), // halves the time it takes to start
	}
	switch c.program {
	case "goflow2":
		command.Path, command.Args = c.binary, c.goflow2Args(n)
	case "nfcapd":
		if command.Args, err = c.nfcapdArgs(n); err != nil {
			return err
		}
	case "sink":
		command.Path, command.Args = c.env.Self(), []string{sinkArg, fmt.Sprint(c.Port), string(c.family), c.path("flows", n), c.path("bmp", n)}
	}
	proc, err := c.env.Start(command)
	if err != nil {
		return err
	}
	// As start-stop-daemon does. The daemon's own pid file comes after its sockets, on a busy machine by
	// seconds, and until then nobody outside could know which process has them.
	if err := os.WriteFile(c.PIDFile, fmt.Appendln(nil, proc.PID), 0o644); err != nil {
		return err
	}
	l := &life{number: n, proc: proc, flows: tail{path: c.path("flows", n)}, bmp: tail{path: c.path("bmp", n)}, log: tail{path: log.Name()}}
	l.killed.Store(-1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lives = append(c.lives, l)
	return nil
}

// PID is that of the core process, also after it ended; 0 before the first Start.
func (c *Collector) PID() int {
	if l := c.now(); l != nil {
		return l.proc.PID
	}
	return 0
}

// Running tells whether the core process lives.
func (c *Collector) Running() bool {
	l := c.now()
	return l != nil && l.proc.Running()
}

// Done is closed when the core process has ended.
func (c *Collector) Done() <-chan struct{} { return c.now().proc.Done() }

// Kill sends sig to the core process. With SIGKILL its plugins stay behind for some seconds, and hold the
// BMP listener open that they inherited.
func (c *Collector) Kill(sig syscall.Signal) error {
	l := c.now()
	if st, err := os.Stat(l.log.path); err == nil {
		l.killed.Store(st.Size())
	}
	return l.proc.Signal(sig)
}

// crash reports, once, that the process ended and nobody killed it.
func (c *Collector) crash(l *life, f func(Record)) {
	if l.proc.Running() || l.killed.Load() >= 0 || l.crashed {
		return
	}
	l.crashed = true
	log, _ := os.ReadFile(l.log.path)
	last := log[max(0, len(log)-600):]
	f(Record{Kind: Crashed, Count: 1, Incarnation: l.number, Text: fmt.Sprintf("%s ended by itself: %v; it said last: %s", c, l.proc.Err(), last)})
}

// Life is how many times the collector was started.
func (c *Collector) Life() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.lives)
}

// Err is how the core process ended.
func (c *Collector) Err() error { return c.now().proc.Err() }

// Dir is where the collector's files are.
func (c *Collector) Dir() string { return c.dir }
