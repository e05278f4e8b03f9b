// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"regexp"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
)

func init() {
	Register(Demo{
		Name:  "handoff",
		Short: "a server with live TCP sessions is killed, and the next process goes on with them",
		Run:   func(ctx context.Context, s *Stage) error { return (&handover{Stage: s}).run(ctx) },
	})
}

// rescues matches the counter of sessions saved after a kill, in the output of weir handoff status.
var rescues = regexp.MustCompile(`\b[1-9]\d* after a crash`)

// handover is the demonstration of the session keeper.
type handover struct {
	*Stage
	host    *Host
	clients talkers

	mu     sync.Mutex
	server *lab.Process
	name   string
	state  string
}

const counterAt = "127.0.0.1:7001"

func (d *handover) run(ctx context.Context) error {
	return all(ctx, d.build, d.talk, d.kill, d.replace)
}

func (d *handover) build(ctx context.Context) (err error) {
	if err := d.Say(ctx, "a crash or a restart of a server ends its connections. The session keeper holds a duplicate of each socket, with the server's last state"); err != nil {
		return err
	}
	if d.host, err = d.Host("server"); err != nil {
		return err
	}
	weir, err := d.Weir()
	if err != nil {
		return err
	}
	d.Typed("weir handoff keep &")
	if _, err := d.host.Daemon("keeper", weir, append(d.host.flags(), "handoff", "keep")...); err != nil {
		return err
	}
	if err := within(ctx, patience, "the session keeper answers", func() error { return dialKeeper(d.host) }); err != nil {
		return err
	}
	d.Live(d.picture)
	return d.start("first")
}

// start starts a process of the server.
func (d *handover) start(name string) error {
	d.Typed("./counter %s &", name)
	p, err := d.host.startCounter(name, counterAt)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server, d.name, d.state = p, name, "serving"
	return err
}

func (d *handover) talk(ctx context.Context) error {
	n := 50
	if d.Short() {
		n = 20
	}
	if err := d.host.reachable(ctx, counterAt); err != nil {
		return err
	}
	if err := d.clients.open(ctx, d.Stage, d.host.Handle, counterAt, n); err != nil {
		return err
	}
	if err := d.clients.round(ctx); err != nil {
		return err
	}
	if err := d.Say(ctx, "%d clients talk to the server. It answers each question with its number in the connection", n); err != nil {
		return err
	}
	_, err := d.host.Type(ctx, "handoff", "status")
	return err
}

// kill kills the server and starts the next process.
func (d *handover) kill(ctx context.Context) error {
	if err := d.Say(ctx, "the server is killed. Its sessions wait at the keeper; no client is told"); err != nil {
		return err
	}
	d.clients.slowest()
	d.Typed("kill -9 %d", d.server.PID)
	d.mu.Lock()
	d.state = "dead"
	d.mu.Unlock()
	if err := d.server.Signal(9); err != nil {
		return err
	}
	<-d.server.Done()
	if err := pause(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	if err := d.start("second"); err != nil {
		return err
	}
	if err := d.clients.round(ctx); err != nil {
		return err
	}
	slowest := d.clients.slowest()
	d.goOn("kill -9")
	d.Sum("kill -9, next process after 0.5 s: longest wait of a client %s.", slowest.Round(time.Millisecond))
	return d.Pace(ctx, 2*time.Second)
}

// goOn checks that all connections continue.
func (d *handover) goOn(event string) {
	n, ended, answers, wrong := d.clients.counts()
	d.Check(ended == 0 && wrong == 0, "after %s: %d of %d connections go on, %d answers, %d wrong", event, n-ended, n, answers, wrong)
}

// replace starts the next process beside the running one.
func (d *handover) replace(ctx context.Context) error {
	if err := d.Say(ctx, "an update: the next process starts beside the old one. The old one hands over its sessions and ends"); err != nil {
		return err
	}
	d.clients.slowest()
	old := d.server
	if err := d.start("third"); err != nil {
		return err
	}
	select {
	case <-old.Done():
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(patience):
		return fmt.Errorf("the old process did not end within %s", patience)
	}
	if err := d.clients.round(ctx); err != nil {
		return err
	}
	slowest := d.clients.slowest()
	d.goOn("the update")
	d.Sum("Update: longest wait of a client %s.", slowest.Round(time.Millisecond))
	n, ended, answers, wrong := d.clients.counts()
	d.Sum("%d connections were served by three processes: %d ended, %d answers, %d wrong.", n, ended, answers, wrong)
	out, err := d.host.Type(ctx, "handoff", "status")
	if err == nil {
		d.Check(rescues.MatchString(out), "the keeper has counted the rescues")
	}
	return err
}

func (d *handover) picture() []string {
	n, ended, answers, wrong := d.clients.counts()
	d.mu.Lock()
	defer d.mu.Unlock()
	return []string{
		fmt.Sprintf("%d clients ──▶ %s ──▶ server %s:  %s", n, counterAt, d.name, d.state),
		"                     └─ session keeper: sockets and states",
		"",
		fmt.Sprintf("connections: %d open, %d ended    answers: %d, %d wrong", n-ended, ended, answers, wrong),
	}
}
