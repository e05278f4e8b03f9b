// SPDX-License-Identifier: Apache-2.0

// Package peers runs the real software of experiments: collectors (pmacct's nfacctd), routers (FRR's bgpd
// with its BMP module) and IPFIX exporters (pmacct's nfprobe, softflowd), all unmodified.
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

// Collector is one collector of pmacct with its restarts: an nfacctd for IPFIX and BMP on one port, or an
// sfacctd for sFlow. All collectors of an experiment may share the port: they set SO_REUSEPORT.
type Collector struct {
	Number   int
	PIDFile  string // of the core process, written at its start
	Port     int
	MaxPeers int      // limit of BMP sessions, with 2 MB of memory each
	Env      []string // added to its environment
	Buffer   int      // between core and plugin, in bytes; 0 is nfacctd's default
	Proxied  bool     // BMP comes through a proxy with a leading PROXY header for the source
	Bound    []string // bind addresses in the syntax of weir.yaml, if different from the service's

	program string
	binary  string // of goflow2, not available as a package
	family  Family // of a sink
	group   string // of sinks: prefix of their names
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
	killed          atomic.Int64 // bytes of log at its kill, -1 before; later lines belong to the kill
	crashed         bool         // its crash was reported
	ready           readiness
}

// now returns the latest life, nil before the first Start.
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

// NewSink prepares a built-in collector, as a substitute for nfacctd.
func NewSink(e *lab.Env, namespace string, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, program: "sink", family: DualStack, ns: namespace})
}

// NewFamilySink prepares a built-in collector of one family, or both. group distinguishes sinks with the
// same number.
func NewFamilySink(e *lab.Env, namespace, group string, family Family, n, port int) (*Collector, error) {
	return newCollector(e, &Collector{Number: n, Port: port, group: group, program: "sink", family: family, ns: namespace})
}

// NewSFlowCollector prepares sfacctd number n, without starting it.
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

// String returns the name of the collector: "nfacctd 2", "v4 sink 2".
func (c *Collector) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %d", c.group, c.program, c.Number))
}

// path returns the path of an output file. Each life has its own set, so the last output of a killed
// process does not mix with the first output of its successor.
func (c *Collector) path(name string, life int) string {
	return filepath.Join(c.dir, fmt.Sprintf("%s-%d.json", name, life))
}

// configuration returns an operator's configuration. Without an address nfacctd listens on [::], for both
// families.
func (c *Collector) configuration(life int) string {
	lines := []string{
		"daemonize: false",
		fmt.Sprintf("%s_port: %d", c.program, c.Port),
		c.program + "_time_new: true",
		c.program + "_disable_checks: false", // sequence numbers are checked, gaps logged
		c.program + "_pipe_size: 4194304",
		"plugins: print[p]",
		"aggregate[p]: peer_src_ip, in_iface",
		// pmacct's own queue can deliver a buffer twice: the core may be preempted between marking it as
		// written and checking for a sleeping plugin. ZeroMQ does not.
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

// Start starts the process. Its sockets appear some seconds later.
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
		Env: append([]string{"MALLOC_TOP_PAD_=67108864"}, c.Env...), // halves the start time
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
	// Like start-stop-daemon. The daemon writes its own pid file after its sockets are open, on a busy
	// machine seconds later. Until then no other process could identify the owner of the sockets.
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

// PID returns the pid of the core process, even after its end; 0 before the first Start.
func (c *Collector) PID() int {
	if l := c.now(); l != nil {
		return l.proc.PID
	}
	return 0
}

// Running reports whether the core process is alive.
func (c *Collector) Running() bool {
	l := c.now()
	return l != nil && l.proc.Running()
}

// Done returns a channel, closed when the core process has ended.
func (c *Collector) Done() <-chan struct{} { return c.now().proc.Done() }

// Kill sends sig to the core process. After SIGKILL its plugins remain for some seconds and hold the
// inherited BMP listener open.
func (c *Collector) Kill(sig syscall.Signal) error {
	l := c.now()
	if st, err := os.Stat(l.log.path); err == nil {
		l.killed.Store(st.Size())
	}
	return l.proc.Signal(sig)
}

// crash reports the end of a process without a kill, once.
func (c *Collector) crash(l *life, f func(Record)) {
	if l.proc.Running() || l.killed.Load() >= 0 || l.crashed {
		return
	}
	l.crashed = true
	log, _ := os.ReadFile(l.log.path)
	last := log[max(0, len(log)-600):]
	f(Record{Kind: Crashed, Count: 1, Incarnation: l.number, Text: fmt.Sprintf("%s ended by itself: %v; its last log line: %s", c, l.proc.Err(), last)})
}

// Life returns the number of starts of the collector.
func (c *Collector) Life() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.lives)
}

// Err returns the exit error of the core process.
func (c *Collector) Err() error { return c.now().proc.Err() }

// Dir returns the directory of the collector's files.
func (c *Collector) Dir() string { return c.dir }
