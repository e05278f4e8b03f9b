// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"weir": func([]string) error { main(); return nil }, "weir-skeleton": func([]string) error { host.Add(featuretest.Declare()); main(); return nil }, "stuck": stuckRole})
	nstest.Main(m)
}

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with a file of testdata. The flag -update writes the file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

// inProcess runs a command line that needs neither rights nor a kernel.
func inProcess(args ...string) (stdout string, err error) {
	var out strings.Builder
	c := newCommand()
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(&out)
	err = c.Execute()
	return out.String(), err
}

// command returns weir as a process of its own.
func command(args ...string) *exec.Cmd {
	return commandOf("weir", args...)
}

// commandOf is like command, with another role.
func commandOf(role string, args ...string) *exec.Cmd {
	c := nstest.Child(role)
	c.Args = append(c.Args, args...)
	c.Dir = "/"
	c.Env = append(c.Env, "WEIR_ROOT=")
	return c
}

// weir runs a command line and waits for its exit.
func weir(t *testing.T, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	return finish(t, command(args...))
}

// asNobody runs a command line without any rights.
func asNobody(t *testing.T, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	nstest.NeedRoot(t)
	c := command(args...)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return finish(t, c)
}

func finish(t *testing.T, c *exec.Cmd) (stdout, stderr string, status int) {
	t.Helper()
	var out, errs strings.Builder
	c.Stdout, c.Stderr = &out, &errs
	err := c.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() < 0) {
		t.Fatalf("%v: %v\n%s", c.Args, err, errs.String())
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

func TestVersion(t *testing.T) {
	defer func(was string) { version = was }(version)
	version = "v1.2.3-4-gabcdef"
	var got strings.Builder
	for _, args := range [][]string{{"version"}, {"version", "--json"}} {
		out, err := inProcess(args...)
		if err != nil {
			t.Fatal(err)
		}
		got.WriteString(strings.ReplaceAll(out, runtime.Version(), "GOVERSION"))
	}
	golden(t, "version.golden", got.String())
}

// The help of every command prints its own usage, hidden commands included. lint/texts has the texts.
func TestHelp(t *testing.T) {
	for _, c := range allCommands(newCommand()) {
		out, err := inProcess(append(strings.Fields(c.CommandPath())[1:], "--help")...)
		if err != nil || !strings.Contains(out, "\n  "+c.CommandPath()) {
			t.Errorf("%s --help: %v: %s", c.CommandPath(), err, out)
		}
	}
}

// The output and exit status of wrong usage.
func TestUsageErrors(t *testing.T) {
	var got strings.Builder
	for _, line := range []string{
		"statsu", "steer", "steer wher 192.0.2.1", "steer frobnicate", "frobnicate now",
		"status extra", "status --jsn", "apply", "apply -f", "apply weir.yaml", "apply --file= --dry-run", "remove a b",
		"steer where", "steer where 192.0.2.1/24", "steer where --slots many 192.0.2.1", "steer where --without 1,x 192.0.2.1",
		"steer devices 192.0.2.1", "steer devices --silent 5", "steer devices --missing sctp", "steer status a b",
		"steer admit", "steer admit svc extra", "steer admit svc --slot x", "steer withdraw", "steer register", "steer register svc extra", "steer unregister",
		"steer register svc --slot 0 --bound x --pid 1", "steer register svc --bound x", "steer unregister svc --slot 0",
		"steer run", "steer run svc", "steer run svc --slot 0", "steer run svc --slot x -- sleep 1", "steer run --slo 1 svc sleep",
		"steer move", "steer move svc", "steer move svc --device 192.0.2.7", "steer move svc --bucket 1 --device 192.0.2.7 --to 2", "steer move svc --bucket 1 --to 2 --back",
		"steer retire svc --slot 0 --stop X", "steer run svc --slot 0 --stop X -- sleep 1", "steer run svc --slot 0 --env X -- sleep 1", "steer drain", "steer drain svc --rate fast", "steer undrain svc extra --slot 1", "steer reset", "apply -f x --rate 5",
		"bypass", "bypass a b", "explain", "explain udp 192.0.2.7:2055", "explain sctp 192.0.2.7:2055 10.0.0.1:4739", "explain udp 192.0.2.7 10.0.0.1:4739",
		"bind add", "bind add www tcp 192.0.2.0/24", "bind add www sctp 192.0.2.0/24 80", "bind add www tcp 192.0.2.0/33 80", "bind add www tcp 192.0.2.0/24 65536",
		"steer unbind www tcp 192.0.2.0/24 80", "steer bindings", "bind remove www tcp 192.0.2.0/24 http", "bind list www", "bind list --proto sctp", "bind list --within x", "bind list --port 70000", "bind load a b", "bind replace a b", "steer services x",
		"steer register www tcp 127.0.0.1", "steer register www tcp 127.0.0.1 80", "steer register www tcp 127.0.0.1 x --pid 1", "steer register www --pid 1", "steer unregister www tcp",
		"filter", "filter lst", "filter list a b", "filter explain", "filter explain udp.dsport", "filter explain udp --hook tc", "filter explain eth.type==2048 --hook nft",
		"filter test", "filter test udp", "filter test udp --rules x -r y", "filter test udp --filter x -r y", "filter test --rules x --list a=b -r y", "filter test udp -r testdata", "filter test udp --list x -r y", "filter test udp.dsport -r x", "filter test -r x",
		"reroute", "reroute plam", "reroute plan", "reroute plan x", "reroute plan -f x --protect all", "reroute plan -f testdata/none.yaml", "reroute plan -f x --change sideways", "reroute plan -f x --change up", "reroute plan -f x --node a --change up --svg y", "reroute plan -f x --node a --destination b --apply", "reroute plan -f x --node a --yaml --json",
		"serve now", "doctor --root", "version 1", "steer hold",
		"nope --help", "steer nope -h", "completion nope --help", "help nope", "help steer nope", "help steer where 192.0.2.1", "completion nope", "completion bash nope",
	} {
		out, err := inProcess(strings.Fields(line)...)
		switch {
		case err != nil:
			fmt.Fprintf(&got, "$ weir %s\n%sweir: %v\nstatus %d\n\n", line, out, err, exitStatus(err))
		case line == "steer", line == "filter", line == "reroute": // these print their help
		default:
			t.Errorf("weir %s: no error", line)
		}
	}
	golden(t, "usage.golden", got.String())
}

func TestExitStatusOfErrors(t *testing.T) {
	for want, errs := range map[int][]error{
		exitFailed: {errors.New("x"), os.ErrNotExist, kernel.ErrABI, kernel.ErrNotExist},
		exitUsage:  {cli.Usage(errors.New("x")), fmt.Errorf("y: %w", cli.Usage(os.ErrPermission))},
		exitCannot: {kernel.ErrUnsupported, fmt.Errorf("x: %w", kernel.ErrUnreadable), &os.PathError{Err: syscall.EACCES},
			&kernel.NeedError{Err: errors.New("x")}, errors.Join(errors.New("x"), syscall.EPERM)},
	} {
		for _, err := range errs {
			if got := exitStatus(err); got != want {
				t.Errorf("%v: status %d, want %d", err, got, want)
			}
		}
	}
}

func TestCompletion(t *testing.T) {
	for shell, want := range map[string]string{
		"bash":       "complete -o default -F __start_weir weir",
		"zsh":        "#compdef weir",
		"fish":       "complete -c weir",
		"powershell": "Register-ArgumentCompleter -CommandName 'weir'",
	} {
		out, err := inProcess("completion", shell)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, %d bytes without %q", shell, err, len(out), want)
		}
		if sh, err := exec.LookPath(shell); err == nil && shell != "powershell" {
			c := exec.Command(sh, "-n")
			c.Stdin = strings.NewReader(out)
			if msg, err := c.CombinedOutput(); err != nil {
				t.Errorf("%s does not take it: %v\n%s", shell, err, msg)
			}
		}
	}
	for line, want := range map[string]string{
		"__complete rem":             "remove\tRemove weir's pins",
		"__complete steer un":        "unregister\t",
		"__complete steer adm":       "admit\t",
		"__complete remove s":        "steer\n",
		"__complete remove f":        "filter\n",
		"__complete apply --d":       "--dry-run\t",
		"__complete steer where --s": "--slots\t",
	} {
		out, err := inProcess(strings.Fields(line)...)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, %q; want %q", line, err, out, want)
		}
	}
	if out, _ := inProcess("__complete", "steer", ""); strings.Contains(out, "hold") || !strings.Contains(out, "where") {
		t.Errorf("steer offers %q", out)
	}
}

// Help texts fit a terminal of 80 columns.
func TestHelpColumns(t *testing.T) {
	for _, c := range allCommands(newCommand()) {
		text, err := inProcess(append(strings.Fields(c.CommandPath())[1:], "--help")...)
		if err != nil {
			t.Errorf("%s --help: %v", c.CommandPath(), err)
		}
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > helpColumns && !strings.HasPrefix(line, `Use "`) { // cobra's last line
				t.Errorf("%s --help: %d columns: %s", c.CommandPath(), n, line)
			}
		}
	}
}
