// SPDX-License-Identifier: Apache-2.0

package reroutestress

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab"
)

// daemon is one end of a foreign BFD session, 10 ms × 3.
type daemon struct {
	kind      string // metric
	namespace string
	home      string
	end       int // 1 or 2
	process   *lab.Process
}

const (
	metricFRR  = "false_downs_frr"
	metricBIRD = "false_downs_bird"
)

// startBFD starts both ends of the installed implementations.
func (x *experiment) startBFD() error {
	for _, s := range []struct {
		kind, program, beside string
		namespaces            [2]string
		start                 func(*experiment, *daemon) error
	}{
		{metricFRR, "bfdd", "vtysh", [2]string{x.world.nearNS, x.world.farNS}, (*experiment).startFRR},
		{metricBIRD, "bird", "birdc", x.world.birdNS, (*experiment).startBIRD},
	} {
		_, err := lab.Find(s.program)
		if _, other := lab.Find(s.beside); err != nil || other != nil {
			x.result.Skip("no comparison with %s: %v", s.kind, errors.Join(err, other))
			continue
		}
		for i, ns := range s.namespaces {
			d := &daemon{kind: s.kind, namespace: ns, end: i + 1, home: filepath.Join(x.env.Dir, fmt.Sprintf("%s-%d", s.program, i+1))}
			if err := os.MkdirAll(d.home, 0o777); err != nil {
				return err
			}
			if err := os.Chmod(d.home, 0o777); err != nil { // FRR runs as a separate user
				return err
			}
			if err := s.start(x, d); err != nil {
				return err
			}
			x.peers = append(x.peers, d)
		}
	}
	return nil
}

func (x *experiment) start(d *daemon, program string, args ...string) error {
	out, err := os.Create(filepath.Join(d.home, "out"))
	if err != nil {
		return err
	}
	defer out.Close()
	d.process, err = x.env.Start(lab.Command{Namespace: d.namespace, Path: program, Args: args, Dir: d.home, Output: out})
	return err
}

// endBFD ends the daemons: they use a third of a CPU, and a varying part.
func (x *experiment) endBFD(ctx context.Context) error {
	for _, d := range x.peers {
		if err := d.process.Signal(syscall.SIGKILL); err != nil {
			return fmt.Errorf("end %s: %w", d.home, err)
		}
		select {
		case <-d.process.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (d *daemon) file(name string) string { return filepath.Join(d.home, name) }

func (x *experiment) startFRR(d *daemon) error {
	config := fmt.Sprintf(`bfd
 peer %s local-address %s
  detect-multiplier 3
  receive-interval 10
  transmit-interval 10
  no shutdown
 exit
exit
`, linkFRR.addr4(3-d.end), linkFRR.addr4(d.end))
	err := errors.Join(os.WriteFile(d.file("bfdd.conf"), []byte(config), 0o644), os.WriteFile(d.file("vtysh.conf"), nil, 0o644))
	if err != nil {
		return err
	}
	return x.start(d, "bfdd", "-f", d.file("bfdd.conf"), "-i", d.file("pid"), "-z", d.file("zserv"), "--vty_socket", d.home, "-P", "0",
		"--bfdctl", d.file("ctl"))
}

func (x *experiment) startBIRD(d *daemon) error {
	config := fmt.Sprintf(`log "%s" all;
router id %s;
protocol device {}
protocol bfd {
	debug { states, events };
	interface "%s" { interval 10 ms; multiplier 3; };
	neighbor %s dev "%s";
}
`, d.file("log"), linkBIRD.addr4(d.end), linkBIRD.device(), linkBIRD.addr4(3-d.end), linkBIRD.device())
	if err := os.WriteFile(d.file("bird.conf"), []byte(config), 0o644); err != nil {
		return err
	}
	return x.start(d, "bird", "-f", "-c", d.file("bird.conf"), "-s", d.file("ctl"), "-P", d.file("pid"))
}

// ask runs a command in a daemon's own shell.
func (d *daemon) ask(ctx context.Context, e *lab.Env, program string, args ...string) (string, error) {
	var out bytes.Buffer
	p, err := e.Start(lab.Command{Namespace: d.namespace, Path: program, Args: args, Output: &out, Timeout: 30 * time.Second})
	if err != nil {
		return "", err
	}
	select {
	case <-p.Done():
	case <-time.After(60 * time.Second):
		return "", fmt.Errorf("%s does not answer", program)
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if err := p.Err(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out.String())
	}
	return out.String(), nil
}

func (d *daemon) vtysh(ctx context.Context, e *lab.Env, command string, into any) error {
	text, err := d.ask(ctx, e, "vtysh", "--vty_socket", d.home, "--config_dir", d.home, "-c", command)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), into)
}

// up returns an error unless the session is up.
func (d *daemon) up(ctx context.Context, e *lab.Env) error {
	if d.kind == metricFRR {
		var peers []struct{ Status string }
		if err := d.vtysh(ctx, e, "show bfd peers json", &peers); err != nil {
			return err
		}
		if len(peers) != 1 || peers[0].Status != "up" {
			return fmt.Errorf("bfdd: %+v", peers)
		}
		return nil
	}
	text, err := d.ask(ctx, e, "birdc", "-s", d.file("ctl"), "show bfd sessions")
	if err == nil && !strings.Contains(text, " Up ") {
		err = fmt.Errorf("bird: %s", text)
	}
	return err
}

// downs returns the number of downs of the session since the daemon's start.
func (d *daemon) downs(ctx context.Context, e *lab.Env) (int, error) {
	if d.kind == metricFRR {
		var peers []struct {
			Down int `json:"session-down"`
		}
		if err := d.vtysh(ctx, e, "show bfd peers counters json", &peers); err != nil {
			return 0, err
		}
		if len(peers) != 1 {
			return 0, fmt.Errorf("%d sessions, want 1", len(peers))
		}
		return peers[0].Down, nil
	}
	log, err := os.ReadFile(d.file("log"))
	if err != nil {
		return 0, err
	}
	return strings.Count(string(log), "changed state from Up to Down"), nil
}
