// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// start runs the agent of a backend in the process's network namespace, until ctx is done. The quarantine stays.
func start(ctx context.Context, root *kernel.Root, c *Config, log *slog.Logger) error {
	return feature.RunAnew(ctx, func() error { return run(ctx, root, c, log) },
		func(reason error) { log.Info("backend agent restarts", "name", c.Name, "err", reason) })
}

// run is start until a device is recreated.
func run(ctx context.Context, root *kernel.Root, c *Config, log *slog.Logger) error {
	o, err := c.options()
	if err != nil {
		return err
	}
	o.Root, o.Log = root, log
	l, err := accept.TCPAhead(ctx, log, c.Listen)
	if err != nil {
		return fmt.Errorf("listen for other backends' agents: %w", err)
	}
	defer l.Close()
	if slices.Contains(c.Devices, loopback) {
		log.Warn("devices include the loopback", "device", loopback, "err", loopbackText)
	}
	if lacks := listens(c).Lacks(); lacks != "" {
		log.Warn("listening ahead of the address", "listen", c.Listen, "err", lacks)
	}
	a, err := New(ctx, o)
	if err != nil {
		return err
	}
	socket, err := control.Listen(ctx, controlName(a.o.Netns), log)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return control.Serve(ctx, socket, a.controls(), log) })
	log.Info("backend agent runs", "name", c.Name, "number", c.Number, "agents", l.Addr().String())
	group.Go(func() error { return a.quarantine.AwaitDevices(ctx, a.o.Netns) })
	group.Go(func() error { return a.Run(ctx, l) })
	return group.Wait()
}

// controlName returns the control socket's name for the agent of a network namespace.
func controlName(ns *netns.Handle) string { return controlNameOf(kernel.ScopeOf(ns)) }

func controlNameOf(scope string) string { return "backend-" + scope }

// controls returns the handler for the commands' requests.
func (a *Agent) controls() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", control.JSON(a.Status))
	mux.HandleFunc("GET /times", control.JSON(a.latest))
	mux.HandleFunc("POST /drain", func(w http.ResponseWriter, r *http.Request) {
		if name := r.FormValue("backend"); name != "" && name != a.o.Name {
			http.Error(w, fmt.Sprintf("this is %s: drain %s there", a.o.Name, name), http.StatusBadRequest)
			return
		}
		// One line of JSON per step, and a last one in case of an error.
		out := json.NewEncoder(w)
		err := a.drain(r.Context(), Draining{Undo: r.FormValue("undo") != "", All: r.FormValue("all") != "", AllowOutage: r.FormValue("outage") != ""}, func(d Drained) {
			_ = out.Encode(d)
			_ = http.NewResponseController(w).Flush()
		})
		if err != nil {
			_ = out.Encode(Drained{Backend: a.o.Name, Reason: err.Error(), Failed: true})
		}
	})
	return mux
}

// errNoAgent means no backend agent answers in this network namespace.
var errNoAgent = errors.New("no backend agent answers: run weir serve in this network namespace, with handoff.backend in its file")

func request(ctx context.Context, method, path string) (*http.Response, error) {
	ns, err := netns.Current()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return requestOf(ctx, controlName(ns), method, path)
}

func requestOf(ctx context.Context, name, method, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, nil)
	if err != nil {
		return nil, err
	}
	r, err := control.Client(name).Do(req)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			return nil, fmt.Errorf("the backend's agent does not answer at %s: is weir serve stopped, or its cgroup frozen? %w", control.Path(name), err)
		}
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("%s: %w: run it with sudo", control.Path(name), os.ErrPermission)
		}
		return nil, fmt.Errorf("%w (%s)", errNoAgent, control.Path(name))
	}
	if r.StatusCode != http.StatusOK {
		defer r.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(r.Body, 4096)) // a partial text is good enough
		return nil, errors.New(strings.TrimSpace(string(b)))
	}
	return r, nil
}

// StatusHere returns the status of the agent in the process's network namespace.
func StatusHere(ctx context.Context) (s Status, err error) {
	ns, err := netns.Current()
	if err != nil {
		return s, err
	}
	defer ns.Close()
	return statusOf(ctx, kernel.ScopeOf(ns))
}

// askAgent limits the wait for an agent's answer. A stopped agent never answers.
const askAgent = 3 * time.Second

// statusOf returns the status of the agent in a network namespace.
func statusOf(ctx context.Context, scope string) (s Status, err error) {
	ctx, cancel := context.WithTimeout(ctx, askAgent)
	defer cancel()
	r, err := requestOf(ctx, controlNameOf(scope), http.MethodGet, "/status")
	if err != nil {
		return s, err
	}
	defer r.Body.Close()
	if err := json.NewDecoder(r.Body).Decode(&s); err != nil {
		return Status{}, fmt.Errorf("wrong answer at the agent's socket %s: %w", control.Path(controlNameOf(scope)), err)
	}
	return s, nil
}

// DrainHere makes the agent drain its backend, see [Agent.drain]. A non-empty name must be the backend's.
func DrainHere(ctx context.Context, name string, how Draining, progress func(Drained)) error {
	v := url.Values{"backend": {name}}
	if how.Undo {
		v.Set("undo", "1")
	}
	if how.All {
		v.Set("all", "1")
	}
	if how.AllowOutage {
		v.Set("outage", "1")
	}
	r, err := request(ctx, http.MethodPost, "/drain?"+v.Encode())
	if err != nil {
		return err
	}
	defer r.Body.Close()
	lines := bufio.NewScanner(r.Body)
	for lines.Scan() {
		var d Drained
		if err := json.Unmarshal(lines.Bytes(), &d); err != nil {
			return fmt.Errorf("wrong answer of the backend's agent: %w", err)
		}
		if d.Failed {
			return errors.New(d.Reason)
		}
		progress(d)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	} else if err := lines.Err(); err != nil {
		return fmt.Errorf("the backend's agent ended, and the drain with it: run weir handoff drain again: %w", err)
	}
	return nil
}
