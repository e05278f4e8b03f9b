// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"strings"
	"syscall"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/redial"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Reader answers reading commands.
type Reader interface {
	Status(ctx context.Context) (Status, error)
	Faults(ctx context.Context) ([]kernel.Fault, error)
	// Query stores a feature's answer to a query in into, a pointer to the answer's type.
	Query(ctx context.Context, name, query string, args url.Values, into any) error
}

// Ask is Reader.Query with the answer as its result.
func Ask[T any](ctx context.Context, r Reader, name, query string, args url.Values) (answer T, err error) {
	return answer, r.Query(ctx, name, query, args, &answer)
}

// Reader returns a reader of the pins if this user may read them. Otherwise it returns a client of the weir serve at
// socket. Kernels before 5.19, and kernels with BPF closed to unprivileged users, refuse even reading. A user without
// CAP_SYS_ADMIN cannot enter network namespaces, so an answering weir serve sees more. A root outside a BPF file system
// is an error and not an empty host, unless records show that its pins were lost.
func (h *Host) Reader(socket string) Reader {
	if !users.Has(unix.CAP_SYS_ADMIN) && h.servedAt(socket) {
		return remote{socket, nil}
	}
	if err := h.Root.Located(); err != nil {
		if faults, _ := h.Root.Check(); len(faults) == 0 {
			return nothing{err}
		}
	}
	all, err := h.Root.Instances("")
	if err == nil && len(all) > 0 {
		if _, merr := h.Root.Meta(all[0]); unreadable(merr) { // the answer reports other errors
			err = merr
		}
	}
	if err == nil {
		_, err = h.Unconfirmed()
	}
	if unreadable(err) {
		return remote{socket, err}
	}
	return pins{h}
}

// servedAt reports whether a weir serve of these pins answers at a socket. The default socket belongs to the default root.
func (h *Host) servedAt(socket string) bool {
	if socket == DefaultSocket && h.Root.Path() != kernel.DefaultRoot {
		return false
	}
	c, err := net.Dial("unix", socket)
	if err != nil {
		return false
	}
	defer c.Close()
	return errors.Join(accept.CheckPath(socket), accept.CheckServer(c, socket, "")) == nil
}

// unreadable reports whether an error means that this user may not read the pins.
func unreadable(err error) bool {
	return errors.Is(err, kernel.ErrUnreadable) || errors.Is(err, os.ErrPermission)
}

// nothing answers every query with an error.
type nothing struct{ reason error }

// Status implements Reader.
func (n nothing) Status(context.Context) (st Status, err error) { return st, n.reason }

// Faults implements Reader.
func (n nothing) Faults(context.Context) ([]kernel.Fault, error) { return nil, n.reason }

// Query implements Reader.
func (n nothing) Query(context.Context, string, string, url.Values, any) error { return n.reason }

type pins struct{ *Host }

// Status reads every feature. If pins are damaged, an unreadable feature does not stop the others: the faults report it.
func (p pins) Status(ctx context.Context) (out Status, err error) {
	if out.Faults, err = p.Faults(ctx); err != nil {
		return out, err
	}
	out.HalfDone, _ = p.HalfDone() // without the right to read the note, nobody knows
	if out.Unconfirmed, err = p.Unconfirmed(); err != nil {
		return out, err
	}
	out.parts = map[string]any{}
	for _, f := range features {
		part, err := f.Report(ctx, p.Root, out.Faults)
		if !feature.Blank(part) {
			out.parts[f.Name] = part
		}
		if err != nil && (damage(out.Faults) == nil || errors.Is(err, context.Canceled)) {
			return out, err
		}
	}
	return out, nil
}

// Query implements Reader.
func (p pins) Query(ctx context.Context, name, query string, args url.Values, into any) error {
	answer, err := p.answer(ctx, name, query, args)
	if err != nil {
		return err
	}
	v, to := reflect.ValueOf(answer), reflect.ValueOf(into).Elem()
	if !v.IsValid() {
		return nil
	}
	if !v.Type().AssignableTo(to.Type()) {
		return fmt.Errorf("%s answers %s with a %s, asked for a %s", name, query, v.Type(), to.Type())
	}
	to.Set(v)
	return nil
}

func (p pins) answer(ctx context.Context, name, query string, args url.Values) (any, error) {
	some, err := named(name)
	if err != nil || len(some) != 1 {
		return nil, fmt.Errorf("query %s/%s: %w", name, query, err)
	}
	if query == feature.StatusQuery {
		faults, err := p.Faults(ctx)
		if err != nil {
			return nil, err
		}
		return some[0].Report(ctx, p.Root, faults)
	}
	for _, q := range some[0].Queries() {
		if q.Name == query {
			return q.Answer(ctx, p.Root, args)
		}
	}
	return nil, fmt.Errorf("%s has no query %q", name, query)
}

// remote asks weir serve.
type remote struct {
	socket string
	reason error // error of reading the pins; nil: weir serve is asked first
}

func (r remote) Status(ctx context.Context) (st Status, err error) {
	return st, r.get(ctx, "/v1/status", nil, &st)
}

func (r remote) Faults(ctx context.Context) (f []kernel.Fault, err error) {
	return f, r.get(ctx, "/v1/faults", nil, &f)
}

// Query implements Reader.
func (r remote) Query(ctx context.Context, name, query string, args url.Values, into any) error {
	return r.get(ctx, "/v1/"+url.PathEscape(name)+"/"+url.PathEscape(query), args, into)
}

func (r remote) get(ctx context.Context, path string, q url.Values, into any) error {
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if err := accept.CheckPath(r.socket); err != nil {
			return nil, err
		}
		c, err := redial.Dial(ctx, "unix", r.socket)
		if err != nil {
			return nil, err
		}
		if err := accept.CheckServer(c, r.socket, ""); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://weir"+path+"?"+q.Encode(), nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return r.unanswered(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Errorf("weir serve: %s", strings.TrimSpace(string(b)))
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// unanswered explains a failed request.
func (r remote) unanswered(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err // without the URL, which means nothing to a user
	}
	switch st, serr := os.Stat(r.socket); {
	case r.reason == nil:
		return fmt.Errorf("ask weir serve on %s: %w", r.socket, err)
	case errors.Is(err, os.ErrPermission) && serr == nil:
		who := "root"
		if gid := int(st.Sys().(*syscall.Stat_t).Gid); gid != 0 {
			who += " and group " + users.GroupName(gid)
		}
		return fmt.Errorf("%w; and weir serve answers only %s on %s: %w", r.reason, who, r.socket, os.ErrPermission)
	}
	return fmt.Errorf("%w; and no weir serve answers on %s: %w", r.reason, r.socket, err)
}
