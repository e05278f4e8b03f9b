// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/clients/go/guard"
	"github.com/weir-project/weir/cmd/weir/cli"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/users"
	"golang.org/x/sys/unix"
)

func guardGrant() *cobra.Command {
	limit := guard.Limit(0)
	var as string
	c := &cobra.Command{
		Use: "grant --limit L [--user U] -- COMMAND [ARG…]", Short: "Start an application with a guard for its own sockets", Args: cobra.ArbitraryArgs,
		Long: `Load a guard, and exec the command with two descriptors of it. The application needs no
rights to attach its sockets: guard.Attach of clients/go/guard finds the descriptors
through the environment (` + guard.GrantEnv + `). setsockopt(SO_ATTACH_BPF) with the first
descriptor works too. The guard ends with its last attached socket. Nothing is pinned.`,
		Example: `  weir guard grant --limit 20kpps --user dns -- /usr/bin/dnsd --port 53`,
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.Usage(errors.New("name the command after --, like weir guard grant --limit 20kpps -- dnsd"))
			}
			if limit == 0 {
				return cli.Usage(errors.New("name the limit, like --limit 20kpps"))
			}
			return grant(limit, as, args)
		},
	}
	c.Flags().Var(&limit, "limit", "packets per second of all guarded sockets together, like 20kpps")
	c.Flags().StringVar(&as, "user", "", "run the command as this user, by name or number, with a clean environment and no_new_privs")
	return c
}

// grant replaces this process by the command. It returns only on failure.
func grant(limit guard.Limit, as string, argv []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	g, err := guard.NewGrant(limit)
	if err != nil {
		return err
	}
	env := os.Environ()
	var id users.Identity
	if as != "" {
		if id, err = users.Find(as); err != nil {
			return fmt.Errorf("--user %s: %w", as, err)
		}
		env = id.Environ()
		runtime.LockOSThread() // no_new_privs is a property of this thread, and exec continues this thread
		if err := errors.Join(id.Confine(), users.LeaveTerminal()); err != nil {
			return err
		}
	}
	// After Confine: duplicate to two consecutive descriptors without close-on-exec.
	first, err := unix.FcntlInt(g.Program.Fd(), unix.F_DUPFD, 3)
	if err != nil {
		return err
	}
	second, err := unix.FcntlInt(g.State.Fd(), unix.F_DUPFD, 3)
	if err != nil {
		return err
	}
	env = append(env, fmt.Sprintf("%s=%d,%d", guard.GrantEnv, first, second))
	if as != "" {
		groups := make([]int, len(id.Credential.Groups))
		for i, n := range id.Credential.Groups {
			groups[i] = int(n)
		}
		if err := errors.Join(syscall.Setgroups(groups), syscall.Setgid(int(id.Credential.Gid)), syscall.Setuid(int(id.Credential.Uid))); err != nil {
			return fmt.Errorf("switch to user %s: %w", as, err)
		}
	}
	if err := syscall.Exec(path, argv, env); err != nil {
		return fmt.Errorf("exec %s: %w", path, err)
	}
	panic("unreachable: exec returned without an error")
}
