// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// sinkConn is a socket of a sink.
type sinkConn interface {
	Close() error
	File() (*os.File, error)
}

// sinkProcess is a collector for tests with the habits of real ones.
type sinkProcess struct {
	specs []string
	open  []sinkConn
}

// runSink opens the sockets given as arguments, and answers every datagram and connection with its PID. It executes the
// commands on its standard input, and exits at the end of the input:
//
//	open SPEC        opens one more socket
//	close N          closes one
//	orphan           starts a child with duplicates of every socket that does not serve
//	daemonize FILE   continues in another process, writes its PID to FILE, and exits
//	term PAUSE       on SIGTERM closes the sockets one by one, in order, with a pause after each, and exits
//	hup PAUSE        on SIGHUP closes and reopens them, with a pause in between
func runSink(listens []string) error {
	s := &sinkProcess{}
	for _, l := range listens {
		if err := s.start(l); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	return s.obey()
}

func (s *sinkProcess) obey() error {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		verb, arg, _ := strings.Cut(in.Text(), " ")
		if err := s.do(verb, arg); err != nil {
			return err
		}
		fmt.Println("done")
	}
	return nil
}

func (s *sinkProcess) do(verb, arg string) error {
	switch verb {
	case "open":
		return s.start(arg)
	case "close":
		i, err := strconv.Atoi(arg)
		if err != nil {
			return err
		}
		return s.open[i].Close()
	case "orphan":
		return s.orphan()
	case "daemonize":
		return s.daemonize(arg)
	case "term", "hup":
		pause, err := time.ParseDuration(arg)
		if err != nil {
			return err
		}
		s.onSignal(verb, pause)
		return nil
	}
	return fmt.Errorf("sink: no verb %q", verb)
}

func (s *sinkProcess) start(spec string) error {
	proto, addr, _ := strings.Cut(spec, "=")
	c, err := sinkSocket(proto, addr)
	if err != nil {
		return err
	}
	s.specs, s.open = append(s.specs, spec), append(s.open, c)
	return nil
}

func (s *sinkProcess) onSignal(verb string, pause time.Duration) {
	came := make(chan os.Signal, 1)
	if verb == "term" {
		signal.Notify(came, syscall.SIGTERM)
		go func() {
			<-came
			for _, c := range s.open {
				c.Close()
				time.Sleep(pause)
			}
			os.Exit(0)
		}()
		return
	}
	signal.Notify(came, syscall.SIGHUP)
	go func() {
		for range came {
			specs := s.specs
			for _, c := range s.open {
				c.Close()
			}
			s.specs, s.open = nil, nil
			for _, spec := range specs {
				time.Sleep(pause)
				if err := s.start(spec); err != nil {
					fmt.Fprintln(os.Stderr, "sink: on SIGHUP:", err)
					os.Exit(1)
				}
			}
		}
	}()
}

// files returns duplicates of all sockets, for a child.
func (s *sinkProcess) files() ([]*os.File, error) {
	var all []*os.File
	for _, c := range s.open {
		f, err := c.File()
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

// orphan starts a sleeping process with duplicates of all sockets.
func (s *sinkProcess) orphan() error {
	c := nstest.Child("sink")
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	files, err := s.files()
	if err != nil {
		return err
	}
	c.Stdin = r
	c.ExtraFiles = append(files, w) // keeps its own input open
	c.SysProcAttr.Setsid = true
	if err := c.Start(); err != nil {
		return err
	}
	fmt.Println("orphan", c.Process.Pid)
	return nil
}

// daemonize continues like daemon(3): the sockets live on in a process without its parent.
func (s *sinkProcess) daemonize(pidFile string) error {
	files, err := s.files()
	if err != nil {
		return err
	}
	c := nstest.Child("inheritor", pidFile, strings.Join(s.specs, " "))
	c.Stdin, c.Stderr, c.ExtraFiles = os.Stdin, os.Stderr, files
	c.SysProcAttr.Setsid = true
	if err := c.Start(); err != nil {
		return err
	}
	os.Exit(0)
	return nil
}

// runInheritor serves inherited sockets: PIDFILE SPECS.
func runInheritor(f []string) error {
	s := &sinkProcess{specs: strings.Fields(f[1])}
	for i, spec := range s.specs {
		file := os.NewFile(uintptr(3+i), spec)
		c, err := inherit(spec, file)
		if err != nil {
			return err
		}
		file.Close()
		s.open = append(s.open, c)
	}
	if err := os.WriteFile(f[0], fmt.Append(nil, os.Getpid()), 0o644); err != nil {
		return err
	}
	return s.obey()
}

func inherit(spec string, file *os.File) (sinkConn, error) {
	if strings.HasPrefix(spec, "udp") {
		p, err := net.FilePacketConn(file)
		if err != nil {
			return nil, err
		}
		go answerDatagrams(p)
		return p.(*net.UDPConn), nil
	}
	l, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	go answerConnections(l)
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.New("no TCP listener")
	}
	return tcp, nil
}
